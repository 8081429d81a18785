"""Every name that vLLM keeps private and this project needs, a file for each part of vLLM.

Imports nothing else of ours. Written against vLLM 0.32.0; `tests/unit/compat` fails loudly when
one of them moves.
"""
