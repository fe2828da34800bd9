"""Options of agents so small that they compile quickly."""

SHORT = dict(rollout_length=4, num_minibatches=2, num_epochs=2, hidden=(8,))
LITTLE = dict(rollout_length=4, capacity=64, batch_size=4, learning_starts=8, replay_ratio=0.25, hidden=(8,))
