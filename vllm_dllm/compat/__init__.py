"""Every name that vLLM keeps private and this project needs, a file for each part of vLLM.

Imports nothing else of ours. Written against vLLM 0.32 and 0.33, whose differences are handled
here (`version.is_at_least`) and nowhere else. `scripts/seams/` lists what must stay as it is:
`tests/unit/compat` fails loudly when some of it moves, and `scripts/check_vllm.py` looks for it in
other versions.
"""
