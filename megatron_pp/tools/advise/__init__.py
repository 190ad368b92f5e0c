"""Which pipeline to run: the search behind ``megatron-pp advise``.

``question.py`` has what is asked, ``model.py`` a model's layers and what they cost. ``transformer.py`` works costs out
from sizes and a GPU's rates, ``megatron_args.py`` reads the sizes from Megatron's arguments. ``candidates.py`` lists
what is tried; ``fit.py`` cuts the model into stages and recomputes layers until each rank keeps to its memory;
``evaluate.py`` builds, verifies and simulates. ``pipeline_search.py`` is the search, ``answer.py`` its answer with
the flags that ask for it.
"""
