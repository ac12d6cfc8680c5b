"""The page over a run: `longrein view`."""
