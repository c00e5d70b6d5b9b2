"""The alphabet: one letter for every kind of axis. It spells variable suffixes, einsum strings, and sharding.

A module that needs another letter, or one of these for something else, says so in its docstring, in a paragraph that
begins with "Letters:". `tests/test_house.py` finds letters that nobody explains. Names say the axes, and not types such
as jaxtyping's, since a name is there where an array is used and an annotation only where it is handed over.

This module knows names only; sizes come from a model's configuration, mesh axes from `sharding.py`.
"""

ALPHABET = {
    "T": "tokens in the step",
    "R": "rows: requests that live on the device",
    "M": "KV blocks per row, at most",
    "B": "KV blocks in the pool",
    "S": "slots per KV block; in `logits_SV` and `hidden_SD`: tokens that are sampled from",
    "D": "model width",
    "N": "query heads",
    "K": "key and value heads",
    "G": "query heads per key head, N / K",
    "H": "width of a head",
    "F": "feed-forward width",
    "V": "vocabulary",
    "L": "layers",
    "Y": "labels of a classifier",
    "W": "32-bit words of a mask with a bit for each token of the vocabulary",
    "C": "candidates of a draw; in `logits_CV`: prompt tokens of one tile",
    "J": "entries of a short list that each row has: stop ids, biases, log probabilities",
    "I": "steps of a multi-step decode",
    "U": "updates of block tables",
    "A": "what a head that drafts reads of a decoder: several hidden states, one behind the other",
    "Z": "an embedding and a hidden state, one behind the other",
    "E": "experts",
    "e": "places of experts on devices: of each expert one, and copies of some where there are more places",
    "Q": "feed-forward width of an expert",
    "O": "feed-forward width of the experts that all tokens share",
    "X": "vocabulary of drafts",
    "a": "numbers of the latent that a token's queries are made of",
    "c": "numbers of the latent that its keys and values are made of",
    "w": "that latent and a key that all heads share, one behind the other",
    "k": "the part of a head's key that is made of the latent and not rotated",
    "x": "channels of a short convolution",
    "t": "tokens that such a convolution sees: the one that it is of, and those before it",
    "v": "width of a head's values, where it is another than its keys'",
    "p": "key and value heads of layers that see all tokens, where others have another number of them",
    "q": "width of their heads",
    "o": "query heads of such layers, likewise",
    "y": "feed-forward width of layers with wide blocks",
    "l": "numbers of a layer's own input",
    "z": "those of all layers, one behind the other",
    "d": "width of a tower, which makes embeddings of pictures",
    "n": "its heads",
    "h": "width of such a head",
    "f": "its feed-forward width",
    "m": "as many widths of it as patches become one embedding",
    "u": "width between the products that make embeddings as wide as the model of what a tower gives",
    "g": "places of a learned table of positions, a tower's or an encoder's",
    "i": "kinds of tokens with a vector of their own, such as those of a first and of a second text",
    "b": "channels of a picture: red, green, blue",
    "j": "frames of a patch",
    "r": "rows of a patch",
    "s": "columns of a patch",
}
"""Every letter that may name an axis; small ones are those of parameters only, of latent attention and of towers."""
