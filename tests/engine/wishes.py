"""Makes requests out of wrong and right kinds of values, and prints what became of each as JSON."""

import json

import numpy as np
import torch

import kvkeep

WRONG = [
    {"prompt": (1.5, 2.0)},
    {"prompt": "a text"},
    {"prompt": b"bytes"},
    {"prompt": ("a", "b")},
    {"prompt": (True, False)},
    {"prompt": 7},
    {"prompt": None},
    {"prompt": [[1, 2]]},
    {"prompt": (1, None)},
    {"prompt": torch.zeros((1, 2), dtype=torch.long)},
    {"prompt": torch.tensor([1.0])},
    {"prompt": {}},
    {"stop": (1,)},
    {"stop": 3},
    {"stop": ("",)},
    {"logprobs": 2.5},
    {"logprobs": True},
    {"logprobs": "3"},
    {"logprobs": 101},
    {"budget": 2.5},
    {"budget": "8"},
    {"budget": 0},
    {"policy": 3},
    {"sampling": {"temperature": 1}},
    {"ignore_end": "no"},
    {"sequence": 1.5},
    {"sequence": 2**64},
]

RIGHT = [[3, 4], torch.tensor([3, 4]), np.array([3, 4]), range(3, 5), iter((3, 4))]


def outcome(wrong):
    try:
        kvkeep.Request(**{"prompt": (1, 2), **wrong})
    except Exception as error:
        return repr(wrong), type(error).__name__, str(error)
    return repr(wrong), None, "it was taken"


def main():
    made = [kvkeep.Request(prompt=prompt, logprobs=np.int64(2), stop="end") for prompt in RIGHT]
    right = [(request.prompt, request.logprobs, request.stop) for request in made]
    print(json.dumps({"wrong": [outcome(wrong) for wrong in WRONG], "right": right}))


if __name__ == "__main__":
    main()
