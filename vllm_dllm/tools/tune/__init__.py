"""`vllm-dllm tune`: searches for settings that answer a task sooner and as well.

One server answers the task's prompts again and again, each time with other `diffusion_*` keys;
Optuna chooses them. One half of the prompts is for the search. The settings that nothing else
beats in both accuracy and speed are then tried on the other half, so that luck in the search does
not count.
"""
