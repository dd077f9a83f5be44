"""One page over many runs: ``python -m recipes.report FOLDER [FOLDER ...]``.

Read the runs (:mod:`~recipes.report.runs`), group them by all but the seed and measure each group against the baseline
(:mod:`~recipes.report.ranking`), draw (:mod:`~recipes.report.curves`, :mod:`~recipes.report.bars`), and write it all down
(:mod:`~recipes.report.sentences`, :mod:`~recipes.report.page`).
"""
