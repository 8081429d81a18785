"""How often each task comes up in training."""

TASK_SHARES = {
    "add": 0.7,
    "sort": 1.5,
    "reverse": 0.5,
    "count_up": 1.0,
    "lookup_short": 1.0,
    "lookup": 2.0,
    "write_json": 0.7,
    "chat": 0.7,
}
# Stages of the model that calls functions: it learns that first.
CALL_SHARES = {
    "first": TASK_SHARES
    | {
        "call": 8.0,
        "call_unnamed": 3.0,
        "first_arguments": 3.0,
        "call_result": 1.5,
        "no_call": 0.5,
    },
    "later": TASK_SHARES
    | {
        "call": 4.0,
        "call_unnamed": 1.2,
        "first_arguments": 1.2,
        "call_result": 0.7,
        "no_call": 0.3,
    },
    # Sorting suffers most from the calls.
    "last": TASK_SHARES
    | {
        "sort": 5.0,
        "write_json": 1.5,
        "call": 2.5,
        "call_unnamed": 0.8,
        "first_arguments": 0.5,
        "call_result": 0.5,
        "no_call": 0.3,
    },
}
# A stage of its own, after match_heads.py and before the tasks come back.
LOOKUP_SHARES = {
    "lookup_dense": 8.0,
    "add": 0.2,
    "sort": 0.4,
    "reverse": 0.2,
    "count_up": 0.3,
    "write_json": 0.2,
    "chat": 0.2,
}
