"""Text in, batches out.

    data = open_data("stdlib")
    check_vocabulary(data, vocab_size)
    batch = sample(data.train, seed=0, step=17, batch=2, ctx=65536)

`spec.py` has the grammar of the data string, `tokenfile.py` the format of token files, `store.py` the cache,
`sampling.py` what a batch is. Nothing here needs JAX.
"""

from oomb_jax.train.data.dataset import Data, Documents, View, check_vocabulary, open_data
from oomb_jax.train.data.sampling import Batch, evaluation_batch, longest, sample, warn_of_repeats
from oomb_jax.train.data.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Data",
    "Documents",
    "Tokenizer",
    "View",
    "check_vocabulary",
    "copy_tokenizer",
    "evaluation_batch",
    "load_tokenizer",
    "longest",
    "open_data",
    "sample",
    "warn_of_repeats",
]
