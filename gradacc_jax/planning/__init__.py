"""Planning: micro-batch, k and policy for a memory budget, chips present or absent.

From the bottom up: what chips there are (``chips.py``) and devices that are not here
(``absent.py``), what a program costs by its jaxpr (``costs.py``) and what memory it
needs by its compiler (``compile.py``), what the answer looks like (``report.py``), the
search (``search.py``), the steps it searches among (``steps.py``), and the functions
that users call (``public.py``).
"""
