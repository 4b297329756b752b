"""Environments of ``verifiers`` 0.4 on the host: their rollouts, played by their own train client.

``source`` reads the environment out of a PRIME-RL TOML and refuses what cannot run here, ``session``
keeps it running in a thread, ``conversion`` makes rollouts of its traces, ``runner`` plays a batch against
the live weights, and ``build`` puts a run together.
"""
