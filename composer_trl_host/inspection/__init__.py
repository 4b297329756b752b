"""``composer-rl inspect``: which turns of recorded traces failed, the hint each gets, the tokens it trains.

Importing this package imports neither torch nor transformers.
"""
