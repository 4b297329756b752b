"""Environments of ``verifiers`` 0.4 on the host: their rollouts, played by their own train client.

``source`` reads the environments out of a PRIME-RL TOML, ``loading`` loads them and refuses what cannot run here,
``session`` keeps one running in a thread, ``conversion`` makes rollouts of its traces, ``mixing`` says which task
each prompt is, ``runner`` plays a batch against the live weights, ``heldout`` evaluates, and ``build`` puts a run
together.
"""
