"""Public bug reports of this field, and the tests that hold this package to not repeating them.

PL: Lightning, PT: PyTorch. They are samples of kinds; each row names the tests of its kind.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# where, symptom, tests as file::name
REPORTS: list[tuple[str, str, list[str]]] = [
    (
        "PL #20404, #9851",
        "uneven batches over ranks hang at the end",
        [
            "strategies/test_training.py::test_uneven_streams_end_and_agree",
            "strategies/test_synchronous.py::test_uneven_streams_end_and_agree",
        ],
    ),
    (
        "PL #8130, #11841",
        "one rank raises, the others hang",
        [
            "strategies/test_launchers.py::test_one_rank_that_raises_ends_the_job_with_its_traceback_and_no_orphan",
            "strategies/test_exceptions.py::test_an_exception_in_any_hook_of_rank_1_ends_all",
            "strategies/test_exceptions.py::test_an_exception_in_any_hook_of_rank_0_ends_all",
        ],
    ),
    (
        "PL #20806",
        "SIGTERM seen at different steps deadlocks",
        [
            "strategies/test_launchers.py::test_sigterm_to_one_rank_ends_the_job_and_the_checkpoint_loads",
            "strategies/test_sigterm.py::test_sigterm_to_one_rank_stops_all_with_the_mean_model",
        ],
    ),
    (
        "PL #379",
        "early stopping on some ranks only",
        ["strategies/test_training.py::test_early_stopping_on_a_metric_that_depends_on_the_rank_stops_all_at_the_same_epoch"],
    ),
    (
        "measured",
        "ReduceLROnPlateau splits the learning rate over ranks",
        ["strategies/test_training.py::test_reduce_lr_on_plateau_keeps_one_learning_rate"],
    ),
    (
        "PL #401, #2537, PT #126510",
        "port in use with two jobs or two Trainers",
        [
            "strategies/test_launchers.py::test_two_jobs_and_two_trainers_at_once_do_not_meet",
            "strategies/test_conformance.py::test_one_strategy_object_fits_validates_tests_predicts_and_fits_again",
        ],
    ),
    (
        "PL #17212, SGP's code",
        "unused parameters crash, or shift gradients",
        ["strategies/test_training.py::test_tied_unused_frozen_complex_and_channels_last_tensors_are_averaged_in_place"],
    ),
    (
        "PT #76282",
        "GradScaler skips a step, so averaging is skipped and ranks fall out of step",
        ["strategies/test_conformance.py::test_a_step_that_one_scaler_skips_is_counted_on_all"],
    ),
    ("PT #74157", "post-local SGD loses accuracy", ["strategies/test_synchronous.py::test_averaging_every_step_is_ddp"]),
    (
        "PT #175145, #18300",
        "point-to-point and collectives on two threads deadlock",
        ["strategies/test_reported.py::test_gossip_beside_thousands_of_collectives_of_the_main_thread"],
    ),
    (
        "PT #75512",
        "a gloo peer exits after isend: connection closed by peer",
        [
            "strategies/test_reported.py::test_a_rank_that_ends_while_a_peer_sends_is_dropped_and_counted",
            "transport/test_conformance.py::test_a_dead_process_is_an_error_at_those_that_wait_for_it",
        ],
    ),
    (
        "gloo #520",
        "a dead peer at lazy connect ignores the time-out",
        ["strategies/test_survival.py::test_the_others_end_every_epoch_when_a_worker_is_killed"],
    ),
    (
        "Bagua PR #110",
        "asynchronous averaging hangs at exit, rarely",
        ["runtime/adpsgd/test_gossip.py::test_200_ends_at_random_moments"],
    ),
    (
        "PL #6789, timm #110",
        "BatchNorm statistics differ over ranks",
        [
            "strategies/test_conformance.py::test_after_a_fit_the_models_are_finite_and_equal_on_all_ranks",
            "strategies/test_conformance.py::test_logged_values_are_the_same_on_all_ranks",
        ],
    ),
    (
        "PL #19764, #5325",
        "resume in mid-epoch repeats or skips data",
        ["strategies/test_conformance.py::test_a_fit_resumes_inside_an_epoch_with_the_samples_that_are_left"],
    ),
    (
        "PL #9388, #16285",
        "ranks SIGKILLed: finalizers and logs lost",
        ["strategies/test_reported.py::test_on_a_failure_the_logger_has_written_and_the_traceback_is_out"],
    ),
    (
        "hivemind #624",
        "peers lost at random",
        ["strategies/test_reported.py::test_with_30_percent_of_the_exchanges_lost_the_loss_still_falls_and_the_counters_match"],
    ),
    (
        "hivemind #676",
        "fixed time-outs are guesses",
        [
            "algorithm/membership/test_failure_detector.py::test_a_peer_that_has_become_slow_gets_the_time_that_it_needs",
            "algorithm/membership/test_failure_detector.py::test_a_deadline_stays_between_its_bounds_and_grows_with_each_wait_in_vain",
        ],
    ),
    (
        "PL #20704, Decent-DP",
        "frozen parameters or buffers differ from the start",
        ["strategies/test_training.py::test_parameters_frozen_ones_and_buffers_start_bit_identical_whatever_the_seeds"],
    ),
    (
        "SGP's code",
        "loaded weights overwritten by a stale gossip copy",
        ["strategies/test_checkpoints.py::test_gossip_at_learning_rate_zero_keeps_the_loaded_weights"],
    ),
    (
        "ACiD's code",
        "an unlocked merge loses updates; the last average races evaluation",
        [
            "runtime/adpsgd/test_gossip.py::test_without_updates_the_sum_of_all_models_stays",
            "strategies/test_training.py::test_a_synchronisation_point_leaves_the_exact_mean_bit_identical_on_all_ranks",
        ],
    ),
    (
        "torch's averager",
        "storage re-bound, channels_last lost",
        [
            "algorithm/adpsgd/test_replica.py::test_shapes_strides_types_and_memory_stay",
            "strategies/test_training.py::test_optimizers_precisions_accumulation_and_clipping_work",
        ],
    ),
    (
        "PL #11300, #18175",
        "a Hydra multirun with process launchers hangs or nests",
        [
            "recipes/test_swept.py::test_a_job_that_fails_leaves_the_others_and_the_sweep_says_so_at_its_end",
            "recipes/test_sweep.py::test_workers_find_their_rank_and_the_resolved_configuration",
        ],
    ),
    (
        "PL #21447",
        "a custom sampler is wrapped with shuffle on",
        ["strategies/test_training.py::test_the_users_own_sampler_is_kept"],
    ),
    (
        "Bluefog #35",
        "division by zero with one process",
        ["strategies/test_conformance.py::test_one_worker_trains_plainly_without_group_or_thread"],
    ),
    (
        "pix2pix #651, MoCo, DINO",
        "what is frozen when workers meet, or follows without gradients, is another model on each rank",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_model.py::test_what_was_trained_stays_shared_when_it_is_frozen",
            "strategies/test_one_model.py::test_all_workers_learn_which_parameters_are_trained",
        ],
    ),
    (
        "PL #16143",
        "steps that go around Lightning's optimizers are not seen, and nobody exchanges",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_model.py::test_each_way_to_change_a_parameter_is_a_step_and_nothing_else_is",
        ],
    ),
    (
        "PL #2534, #5473",
        "checkpoints of one worker's moment, inside an epoch or a step, hang or fail",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_asking.py::test_a_checkpoint_inside_an_epoch_is_saved_at_rank_0s_steps",
            "strategies/test_asking.py::test_checkpoints_by_steps_and_by_time_are_those_of_rank_0_and_the_work_is_shared",
        ],
    ),
    (
        "SLURM users",
        "max_time ends workers at moments of their own",
        ["strategies/test_asking.py::test_when_the_time_of_one_worker_is_up_all_stop_and_a_resume_goes_on_there"],
    ),
    (
        "PL #17124, superpoint_transformer #165",
        "metrics of a fit do not pickle, and copies see one rank's samples",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_metrics.py::test_a_pickle_of_a_fit_holds_nothing_of_ours",
            "strategies/test_metrics.py::test_a_trackers_copies_see_all_workers",
        ],
    ),
    (
        "lightning-bolts' BYOL",
        "schedules by the loader's length: no length, NaN progress, no last batch",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_dataloader.py::test_the_training_loader_reads_as_the_users_under_ddp",
            "strategies/test_dataloader.py::test_progress_by_the_number_of_batches_rises_to_one_and_the_last_batch_comes_once_an_epoch",
        ],
    ),
    (
        "optuna #3783, #6043",
        "a trial that is pruned by an exception ends every later fit of the process",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "runtime/membership/test_failed_attempts.py::test_an_exception_on_all_ends_one_use_only",
            "strategies/test_uses.py::test_a_script_that_catches_an_exception_trains_on",
        ],
    ),
    (
        "miles-credit #394, PT #13350",
        "averaged unit vectors, queues and codebooks lose what they are",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_model.py::test_what_requires_a_gradient_and_running_statistics_are_shared",
            "strategies/test_one_model.py::test_what_differs_is_averaged_if_it_is_an_average_and_otherwise_that_of_rank_0",
        ],
    ),
    (
        "PL #21773",
        "a data set that grows: schedules go by the first loader",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_dataloader.py::test_schedules_follow_a_data_set_that_grows",
        ],
    ),
    (
        "PL #12040",
        "rank 0 works alone for minutes while the others wait for it",
        [
            "field/test_cases.py::test_what_takes_minutes_works",
            "strategies/test_uses.py::test_an_exchanges_deadline_does_not_bound_a_users_collectives",
        ],
    ),
    (
        "lightning-bolts #179",
        "all_gather with gradients in a step",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_lockstep_gather.py::test_a_gather_is_of_those_that_make_the_step_and_gradients_go_back_to_all",
        ],
    ),
    (
        "torchmetrics users",
        "metrics of a set that the workers do not divide are of repeated samples",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_evaluation.py::test_metrics_are_those_of_one_process_and_each_sample_is_evaluated_once",
            "strategies/test_evaluation.py::test_each_sample_is_predicted_once_under_its_own_number",
        ],
    ),
    (
        "PL's WeightAveraging",
        "averages of the weights differ over ranks",
        [
            "field/test_cases.py::test_what_works_under_ddp_works",
            "strategies/test_one_model.py::test_averaged_weights_become_one_and_the_next_step_is_averaged_by_all_or_none",
        ],
    ),
    (
        "measured: GLOO_SOCKET_IFNAME",
        "a failure that is no death is tried again for ever",
        [
            "runtime/membership/test_failed_attempts.py::test_what_fails_on_all_is_raised_by_all_after_one_repeat_at_most",
            "runtime/membership/test_failed_attempts.py::test_groups_that_can_never_be_made_are_tried_twice",
            "strategies/test_uses.py::test_a_collective_that_torch_refuses_is_refused_as_under_ddp",
        ],
    ),
    (
        "measured: terminate called without an active exception",
        "a process that trained well aborts when it ends, on a busy machine",
        [
            "runtime/test_process_end.py::test_threads_end_before_the_groups_they_may_use",
            "strategies/test_launchers.py::test_the_same_script_runs_under_torchrun",
        ],
    ),
    (
        "measured: one traceback a rank",
        "the reason of a failure is lost among those it has caused",
        [
            "runtime/test_causes.py::test_the_first_of_several_with_the_same_mistake_tells_of_it",
            "strategies/test_launchers.py::test_one_rank_that_raises_ends_the_job_with_its_traceback_and_no_orphan",
        ],
    ),
    (
        "measured: prefetching loaders",
        "one worker trains most of a short first epoch",
        [
            "runtime/work_sharing/test_claim_counter.py::test_the_first_epoch_of_equal_workers_is_as_short_as_can_be",
            "simulation/test_sessions.py::test_the_first_epoch_of_equal_workers_is_as_short_as_can_be",
        ],
    ),
]


def names_in(file: Path) -> set[str]:
    """Names of the functions that pytest collects as tests."""
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize(("where", "symptom", "tests"), REPORTS, ids=[where for where, *_ in REPORTS])
def test_a_report_has_tests_that_exist(where: str, symptom: str, tests: list[str]) -> None:
    assert tests, (where, symptom)
    for test in tests:
        file, name = test.split("::")
        assert name in names_in(ROOT / "tests" / file), test


def test_a_name_that_is_none_is_noticed() -> None:
    assert "test_that_nobody_wrote" not in names_in(Path(__file__))
    assert "test_a_name_that_is_none_is_noticed" in names_in(Path(__file__))
