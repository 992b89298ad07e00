"""The train room: a training loop that `torchrun` starts, from a recipe. Nothing here loads torch before it trains."""
