"""A process that writes rollouts for ever and says which are acknowledged, until it is killed: `killed.py FOLDER FIRST`."""

from __future__ import annotations

import os
import sys
from collections import deque

from records import rollout

from longrein.runs import RunWriter

with RunWriter(sys.argv[1]) as run:
    waiting = deque()
    for seed in range(int(sys.argv[2]), 10**9):
        written = run.write(rollout(seed), step=seed)
        written.add_done_callback(lambda done, seed=seed: done.exception() or os.write(1, f"{seed}\n".encode()))
        waiting.append(written)
        if len(waiting) > 8:  # a few are always under way
            waiting.popleft().result()
