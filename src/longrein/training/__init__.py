"""Training: the trainer on TRL, advantages, log-probabilities, and the small policy that `make train` starts from."""
