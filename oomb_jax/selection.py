"""Which earlier pages the queries of a page attend to: representatives, scores, the best K, and their staging slots.

With k_j the keys of page p after RoPE, and q_in the queries of query page r (i its tokens, n the heads of a group),

    representative_pm = mean_j k_jm
    logit_imp         = (sum_{n in group m} q_in) · representative_pm
    score_rp          = sum_i sum_m softmax_p(logit_im.)_p

and query page r attends to the K candidates of the highest score, beside its own chunk. Source: "Out of the Memory
Barrier" (arXiv 2602.02108). The candidates are the pages before the chunk that share a document with a query of the
page. Segment ids never decrease, so they are the last pages before the chunk, and all of one document: that of the
query page's first token.

All functions are pure, have static shapes, and serve one layer. -1 stands for "no page" and "no slot". Scopes are named
so that a profile tells what the choice costs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from oomb_jax.gradient_slots import most_at_once
from oomb_jax.pallas_kernels.page_score import Implementation, page_scores
from oomb_jax.shapes import Keys, Pool, Queries, accumulator, divisor, iota

Rule = Literal["mean"]
Scope = Literal["all_heads", "kv_head"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """Every query attends to its own chunk and to the K pages before it that score highest for its query page; where
    there are at most K, to all of them. The default is the rule of the paper."""

    pages: int = 64
    """K, pages that a query page chooses, the forced ones among them."""

    rule: Rule = "mean"
    """What represents a page in the scores: `"mean"`, the mean of its keys."""

    scope: Scope = "all_heads"
    """`"all_heads"`: one choice for all heads, by the sum of their scores. `"kv_head"`: one for each key/value head."""

    first_pages: int = 0
    """Pages at the beginning of the document that are always chosen."""

    local_pages: int = 0
    """Pages just before the chunk that are always chosen."""

    scaled: bool = False
    """Whether logits are divided by sqrt(H), as in attention. It makes the softmax flatter."""

    def __post_init__(self):
        if self.pages < 1:
            raise ValueError(f"pages={self.pages}: at least 1")
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule={self.rule!r}: one of {get_args(Rule)}")
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope={self.scope!r}: one of {get_args(Scope)}")
        if self.first_pages < 0 or self.local_pages < 0:
            raise ValueError(f"first_pages={self.first_pages}, local_pages={self.local_pages}: at least 0")
        if self.first_pages + self.local_pages > self.pages:
            raise ValueError(
                f"first_pages={self.first_pages} and local_pages={self.local_pages} count among pages={self.pages}: "
                f"raise pages to {self.first_pages + self.local_pages} or force fewer"
            )


def representatives(k: Keys, page: int) -> Float[Array, "pages M H"]:
    """One vector for each whole page of keys (after RoPE): their mean, in their dtype.

    The mean is rounded once. In bfloat16 its error is that of a single key, the matrix units take it as it is, and
    four million tokens of Qwen2.5-7B have 0.9 GiB of it instead of 1.8.
    """
    C, M, H = k.shape
    return jnp.mean(k.reshape(C // page, page, M, H), axis=1, dtype=accumulator(k.dtype)).astype(k.dtype)


@jax.named_scope("selection")
def select(
    attention: TopK,
    q: Queries,
    representatives: Float[Array, "P M H"],
    first_page: Int[Array, ""],
    *,
    page: int,
    tokens: Int[Array, ""] | None = None,
    q_segments: Int[Array, " C"] | None = None,
    pool_segments: Int[Array, "P S"] | None = None,
    implementation: Implementation | None = None,
) -> Int[Array, "R *M K"]:
    """The pages that each query page of a chunk attends to.

    Args:
      attention: K and the rule.
      q: queries of the chunk after RoPE, whole pages of them.
      representatives: of the layer's pages. Those from `first_page` on may hold anything.
      first_page: the chunk's first page, so the number of pages before it.
      page: S, tokens in a page.
      tokens: how many tokens of the chunk are real; the others, at its end, are padding. None: all.
      q_segments, pool_segments: document ids of the chunk's tokens and, by page id, of the pages' tokens, as for
        `paged_attention`; both or neither.
      implementation: of the scores; see `page_scores`.

    Returns:
      int32 page ids [R, min(K, P)], or [R, M, min(K, P)] with one list for each key/value head. Ids of a list rise,
      then come -1. Of equal scores the lower id is chosen.

      Only queries that can see a candidate have a say: not padding, nor queries of a document that begins after the
      query page does. So a document's choice does not depend on what follows it. A query page without such a query
      (all padding) chooses nothing.
    """
    if (q_segments is None) != (pool_segments is None):
        raise ValueError("q_segments and pool_segments go together: give both or neither")
    C, P = q.shape[0], representatives.shape[0]
    by_page = lambda x: x.reshape(C // page, page)
    votes = by_page(iota(C) < (C if tokens is None else tokens))
    start = jnp.where(votes[:, 0], 0, first_page)
    if q_segments is not None and pool_segments is not None:
        ids = by_page(q_segments)
        votes &= ids == ids[:, :1]
        shared = (pool_segments[None, :, -1] == ids[:, :1]) & (iota(P) < first_page)[None]
        start = jnp.maximum(start, first_page - jnp.sum(shared, axis=1, dtype=jnp.int32))
    scores = page_scores(
        *(q, representatives, start, first_page, votes.reshape(C)),
        scaled=attention.scaled,
        implementation=implementation,
    )
    if attention.scope == "all_heads":
        scores = jnp.sum(scores, axis=1, keepdims=True)
    chosen = _best(attention, scores, start[:, None, None], first_page)
    return chosen[:, 0] if attention.scope == "all_heads" else chosen


def _best(
    attention: TopK, scores: Float[Array, "R m P"], start: Int[Array, "R 1 1"], end: Int[Array, ""]
) -> Int[Array, "R m K"]:
    P = scores.shape[-1]
    ids = iota(P)[None, None]
    forced = (ids < start + attention.first_pages) | (ids >= end - attention.local_pages)
    scores = jnp.where(forced, jnp.inf, scores)
    scores = jnp.where((ids >= start) & (ids < end), scores, -jnp.inf)
    best = lax.top_k(scores, min(attention.pages, P))[1]
    # By their ids rather than their scores, which may be NaN where training has diverged.
    best = jnp.sort(jnp.where((best >= start) & (best < end), best, P), axis=-1)
    return jnp.where(best == P, -1, best)


class Staging(NamedTuple):
    """Distinct pages of a table, each in a slot of its own, and the table with slots for pages."""

    pages: Int[Array, " U"]
    """The page of each slot, rising, then -1: slots that stay empty."""
    table: Int[Array, "R *M K"]
    """The slot of each entry; -1 where the table has -1."""


@jax.named_scope("slots")
def stage(table: Int[Array, "R *M K"], pages: int) -> Staging:
    """Slots for the distinct pages of a chunk and layer: U = min(pages, entries of the table), so all have one.

    Args:
      table: page ids, -1 = none.
      pages: P, the pages of the pool; ids are below it.
    """
    ids = jnp.sort(jnp.where(table < 0, pages, table).reshape(-1))
    distinct = jnp.sort(jnp.where(_first_of_equals(ids), ids, pages))[: min(pages, len(ids))]
    # The end of the ids stands for no page, and `drop` writes nothing there.
    slot = jnp.zeros(pages, jnp.int32).at[distinct].set(iota(len(distinct)), mode="drop")
    return Staging(
        pages=jnp.where(distinct == pages, -1, distinct),
        table=jnp.where(table < 0, -1, slot[jnp.maximum(table, 0)]),
    )


def distinct_pages(table: Int[Array, "R *M K"]) -> Int[Array, ""]:
    """How many different pages a table names."""
    ids = jnp.sort(table.reshape(-1))
    return jnp.sum(_first_of_equals(ids) & (ids >= 0), dtype=jnp.int32)


def statistics(
    selection: Int[Array, "n L R *M K"], mass: Float[Array, "L 2"], page: int
) -> dict[str, Float[Array, ""]]:
    """What a step tells of its selection.

    Args:
      selection: the tables of every chunk of a sequence and every layer.
      mass: of each layer, sums of what `attention_mass` returned.
      page: S, tokens in a page.

    Returns:
      distinct_pages, the mean over chunks and layers; gradient_pages, the most of any layer that hold a gradient at
      once, so that `kv_grad_pages` need not be more; attention_share; and recall, the share of dense attention
      probability outside the own chunk that the chosen pages hold, 1 where there is none.
    """
    tables = selection.reshape(-1, *selection.shape[2:])
    chosen, earlier = jnp.sum(mass, axis=0)
    return {
        "distinct_pages": jnp.mean(jax.lax.map(distinct_pages, tables).astype(mass.dtype)),
        "gradient_pages": jnp.max(most_at_once(selection)).astype(mass.dtype),
        "attention_share": attention_share(selection, page).astype(mass.dtype),
        "recall": jnp.where(earlier > 0, chosen / jnp.where(earlier > 0, earlier, 1), 1),
    }


def attention_share(selection: Int[Array, "n L R *M K"], page: int) -> Float[Array, ""]:
    """Pairs of a query and a key that attention computes, over those that `Dense` would.

    Args:
      selection: the tables of every chunk of a sequence and every layer.
      page: S, tokens in a page.
    """
    n, L, R, *heads, _ = selection.shape
    chosen = jnp.sum(selection >= 0, dtype=jnp.float32) / math.prod(heads) * page**2
    own = float(L * n * (R * page) * (R * page + 1) // 2)
    earlier = float(L * n * (n - 1) // 2 * (R * page) ** 2)
    return (chosen + own) / (earlier + own)


@jax.named_scope("recall")
def attention_mass(
    q: Queries,
    k_new: Keys,
    k_pool: Pool,
    layer: Int[Array, ""],
    first_page: Int[Array, ""],
    table: Int[Array, "R *M K"],
    sample: Int[Array, " s"],
    *,
    q_segments: Int[Array, " C"] | None = None,
    pool_segments: Int[Array, "pages S"] | None = None,
    fetch: Callable[[Pool, Int[Array, ""], Int[Array, " u"]], Float[Array, "u M S H"]] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Dense attention probability that lies on the chosen pages, and on all pages before the chunk.

    Both are sums over query heads and the queries of some query pages. Sums of the first over chunks, divided by sums
    of the second, are the recall of the selection.

    Args:
      q, k_new: queries and keys of the chunk.
      k_pool: all layers' pages of keys; those from `first_page` on may hold anything.
      layer: which layer of the pool.
      first_page: the chunk's first page.
      table: what `select` returned.
      sample: indices of the query pages to look at.
      q_segments, pool_segments: as for `select`.
      fetch: `fetch(k_pool, layer, ids)` reads pages, where indexing cannot.
    """
    C, N, H = q.shape
    _, P, M, S, _ = k_pool.shape
    dtype = accumulator(q.dtype)
    rows = lambda x: x.reshape(-1, S, *x.shape[1:])[sample]
    queries = rows(q).reshape(-1, S, M, N // M, H)
    query_ids = None if q_segments is None else rows(q_segments)
    lists = table[sample].reshape(len(sample), -1, table.shape[-1])  # one for all heads, or one for each key/value head
    # About 64 MiB of scores at once.
    width = divisor(P, 2**24 // (queries.size // H * S))

    def lse(keys: Float[Array, "u M H"], ids: Int[Array, " u"] | None, mask: Bool[Array, "s S u"]):
        """Of every query and page of these keys: [s, M, G, S, pages]."""
        scores = jnp.einsum("sqmgh,umh->smgqu", queries, keys.astype(q.dtype), preferred_element_type=dtype) * H**-0.5
        if ids is not None and query_ids is not None:
            mask &= query_ids[:, :, None] == ids[None, None]
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
        return jax.nn.logsumexp(scores.reshape(*scores.shape[:-1], -1, S), axis=-1)

    def block(j, carry):
        chosen, earlier = carry
        pages = j * width + iota(width)
        keys = (
            (k_pool[layer, pages] if fetch is None else fetch(k_pool, layer, pages))
            .swapaxes(1, 2)
            .reshape(width * S, M, H)
        )
        ids = None if pool_segments is None else pool_segments[pages].reshape(-1)
        before = jnp.broadcast_to(jnp.repeat(pages < first_page, S), (len(sample), S, width * S))
        more = lse(keys, ids, before)
        named = jnp.any(lists[..., None] == pages[None, None, None], axis=2)[:, :, None, None]
        total = lambda old, new: jnp.logaddexp(old, jax.nn.logsumexp(new, axis=-1))
        return total(chosen, jnp.where(named, more, -jnp.inf)), total(earlier, more)

    causal = rows(iota(C))[:, :, None] >= iota(C)[None, None]
    own = jax.nn.logsumexp(lse(k_new, q_segments, causal), axis=-1)
    nothing = jnp.full_like(own, -jnp.inf)
    chosen, earlier = lax.fori_loop(0, (first_page + width - 1) // width, block, (nothing, nothing))
    everything = jnp.logaddexp(own, earlier)
    return jnp.sum(jnp.exp(chosen - everything)), jnp.sum(jnp.exp(earlier - everything))


def _first_of_equals(x: Int[Array, " n"]) -> Bool[Array, " n"]:
    """Of sorted numbers: whether each is the first of its value."""
    return jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])
