"""Searches for the pipeline to run, for ``megatron-pp advise``.

``question.py`` is the question, ``model.py`` a model's layers and their costs. ``transformer.py`` estimates costs from
sizes and a GPU's rates, ``megatron_args.py`` reads the sizes from Megatron's arguments. ``candidates.py`` lists the
candidates. ``fit.py`` cuts the model into stages and recomputes layers until each rank keeps to its memory.
``evaluate.py`` builds, verifies and simulates plans. ``pipeline_search.py`` is the search, ``answer.py`` its answer
with the flags to paste.
"""
