"""The parity suite: channel 1 against PRIME-RL's own loss functions, release by release.

``python -m parity`` compares with the recorded vectors of every release in ``releases.RELEASES``;
``--prime-rl PATH`` compares with the functions of that checkout themselves. See docs/parity.md.
"""
