"""One page over many runs: ``python -m recipes.report FOLDER [FOLDER ...]``.

Read the runs (:mod:`~recipes.report.runs`), take together what differs in its seed alone (:mod:`~recipes.report.groups`),
measure against the baseline (:mod:`~recipes.report.ranking`), draw (:mod:`~recipes.report.curves`,
:mod:`~recipes.report.bars`), and write it all down (:mod:`~recipes.report.tables`, :mod:`~recipes.report.sentences`,
:mod:`~recipes.report.page`).
"""
