"""One page over many runs: ``python -m recipes.report FOLDER [FOLDER ...]``.

Read the runs into tables of pandas (:mod:`~recipes.report.runs`), take together what differs in its seed alone and rank it
against the baseline (:mod:`~recipes.report.groups`), draw (:mod:`~recipes.report.curves`, :mod:`~recipes.report.bars`), and
write it all down (:mod:`~recipes.report.sentences`, :mod:`~recipes.report.page`).
"""
