"""Which tokens of a micro-batch live on which context-parallel rank, as index arithmetic.

A micro-batch is a list of pieces. A *sharding* cuts the pieces into *chunks* (a range of tokens
of one piece) and deals them to the ranks of the context-parallel group:

===========================  ==================================================================
``per_sequence``             the concatenation in 2·CP chunks, in pairs (Llama 3)
``per_document``             each piece in such pairs, its remainder token by token (WLB-LLM §5.1)
``per_document_contiguous``  each piece in such pairs, its remainder in one chunk
``hybrid``                   long pieces cut at tile boundaries, short ones whole on one rank
``ptrr``                     tiles of queries dealt greedily by work
===========================  ==================================================================

:func:`.choose` takes the sharding with the least predicted latency for a micro-batch.

The rows of a rank are its chunks one after another, padded at the end so that all ranks have
equally many rows and tensor parallelism can divide them. Each chunk is one attention segment. The
segment's queries are the chunk's rows. Its keys are the piece's tokens from the piece's start (with
a sliding window, from the first key that the first query sees) to the chunk's end. The causal mask
is aligned at the bottom right: the last query belongs to the same token as the last key.
"""

from lightning_wlb.sharding.adaptive import ADAPTIVE as ADAPTIVE
from lightning_wlb.sharding.adaptive import Tokens as Tokens
from lightning_wlb.sharding.adaptive import choose as choose
from lightning_wlb.sharding.adaptive import choose_each as choose_each
from lightning_wlb.sharding.layout import SHARDINGS as SHARDINGS
from lightning_wlb.sharding.layout import Layout as Layout
from lightning_wlb.sharding.layout import chunks_of_each as chunks_of_each
from lightning_wlb.sharding.layout import layout as layout
from lightning_wlb.sharding.rank_indices import RankIndices as RankIndices
from lightning_wlb.sharding.rank_indices import rank_indices as rank_indices
from lightning_wlb.sharding.rank_indices import traffic as traffic
from lightning_wlb.sharding.rank_indices import uses_all_to_all as uses_all_to_all
