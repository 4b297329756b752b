"""The live policy behind vLLM's token endpoint: ids in, sampled ids and their log-probs out.

``protocol`` is what stands in requests and answers, ``batching`` the queue between the connections and
the thread that generates, ``app`` the ASGI application, ``server`` the thread that serves it and
``generation`` transformers' generation with one set of sampling parameters per row.
"""

from composer_trl_host.serving.batching import BatchQueue, Ticket
from composer_trl_host.serving.generation import TokenGenerator
from composer_trl_host.serving.protocol import Completion, Sampling
from composer_trl_host.serving.server import TokenServer

__all__ = ["BatchQueue", "Completion", "Sampling", "Ticket", "TokenGenerator", "TokenServer"]
