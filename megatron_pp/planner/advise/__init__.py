"""Which pipeline to run: the search behind ``megatron-pp advise``.

``question.py`` what is asked: ranks, memory, a model in layers, links
``model.py`` layers and what they cost; ``transformer.py`` the same from sizes and a GPU's rates; ``megatron_args.py``
from Megatron's arguments
``layout.py`` layers per stage; ``fit.py`` what is recomputed so that a rank keeps to its memory
``candidates.py`` what is tried; ``evaluate.py`` its step and memory, verified and simulated
``pipeline_search.py`` the search; ``answer.py`` its answer; ``flags.py`` the flags that ask for it
"""
