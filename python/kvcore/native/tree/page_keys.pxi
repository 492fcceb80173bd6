# SPDX-License-Identifier: Apache-2.0
"""Chained content keys of pages."""


SCHEME_VERSION = kKeySchemeVersion


cdef bytes bytes_of(PageKey key):
    return PyBytes_FromStringAndSize(<char*>key.data(), key.size())


cdef list keys_from(const CppKeyChain* chain, size_t first):
    """Return the keys of the complete pages from page `first` on."""
    cdef const PageKey* keys = chain.keys().data()
    cdef size_t i
    return [bytes_of(keys[i]) for i in range(first, chain.keys().size())]


def digest_of(item):
    """Return the SHA-256 of a value in canonical CBOR: None, int, str, bytes, lists and tuples."""
    cdef string out
    put_item(out, item, "item", 0)
    return bytes_of(Sha256.of(out.data(), out.size()))


def root_key(*, extra_key=None, cache_salt=None, seed=None, scheme="kvcore"):
    """Return the root key of a sequence, the parent key of its first page.

    Parameters
    ----------
    extra_key, cache_salt : str, optional
        Prefix-cache namespace, as of a context.
    seed : str, bytes or int, optional
        Users of one store with different seeds do not find each other's pages.
    scheme : str
        "kvcore" or "vllm", see ``page_keys``.

    Returns
    -------
    bytes [32]

    Raises
    ------
    ValueError, TypeError
        As for ``page_keys``.

    Examples
    --------
    >>> from kvcore.keys import root_key
    >>> root_key().hex()
    'a630a5f1a5271031242f1fd64a16e4ada34d48cccd10ce74d45a95db82b3afdb'
    """
    return bytes_of(cpp_root_key(as_options(extra_key, cache_salt, seed, scheme, None, 1)))


def page_key(parent, tokens, extra=None):
    """Return the key of one page.

    Parameters
    ----------
    parent : bytes [32]
        The key of the page before it, or a root key.
    tokens : list of int, or array int32 or int64 [n]
        The page's tokens.
    extra : list, optional
        Content that distinguishes the page from a page with equal tokens: lists and tuples of int,
        str, bytes and None, in the form of ``kvcore.extra_keys.keys_of_pages``. None or empty
        without extra content.

    Returns
    -------
    bytes [32]
        SHA-256 of ``[parent, [tokens...], extra]`` in canonical CBOR.

    Raises
    ------
    ValueError
        `parent` has another length, a token is outside int32, or an int of `extra` outside int64.
    TypeError
        An argument or an item of `extra` has another type.

    Examples
    --------
    >>> from kvcore.keys import page_key
    >>> page_key(bytes(32), list(range(16))).hex()
    '2464a2d934d06889ea9ce93b71642eaf2348923006a6214c1d6b1340eb482213'
    """
    cdef PageKey front = as_page_key(parent)
    cdef string item
    if extra is not None:
        if not isinstance(extra, (list, tuple)):
            raise TypeError(
                f"extra is a {type(extra).__name__}, must be a list or tuple, or None"
            )
        if extra:
            put_item(item, extra, "extra", 0)
    cdef cnp.ndarray source = as_tokens(tokens)
    return bytes_of(cpp_page_key(
        front, <const int32_t*>cnp.PyArray_DATA(source), cnp.PyArray_DIM(source, 0),
        string_view(item.data(), item.size()),
    ))


@cython.final
cdef class KeyChain:
    """The page keys of a growing sequence.

    Parameters
    ----------
    page_size : int
        Tokens per page.
    extra_key, cache_salt, seed, prompt_embeds, scheme
        As for ``page_keys``.

    Raises
    ------
    ValueError, TypeError
        As for ``page_keys``.

    Notes
    -----
    A chain hashes new tokens and does not keep them: a call costs O(new tokens), whatever the
    length of the sequence. One thread at a time uses a chain.

    Examples
    --------
    >>> from kvcore.keys import KeyChain, page_keys
    >>> chain = KeyChain(2, cache_salt="tenant")
    >>> len(chain.extend([1, 2, 3])), len(chain.extend([4, 5]))
    (1, 1)
    >>> chain.keys == page_keys([1, 2, 3, 4, 5], 2, cache_salt="tenant")
    True
    """

    cdef unique_ptr[CppKeyChain] chain
    cdef bint is_vllm

    def __cinit__(self, object page_size, *, object extra_key=None, object cache_salt=None,
                  object seed=None, object prompt_embeds=None, object scheme="kvcore"):
        cdef int64_t size = as_page_size(page_size)
        cdef KeyOptions options = as_options(
            extra_key, cache_salt, seed, scheme, prompt_embeds, size
        )
        self.is_vllm = options.scheme == KeyScheme.kVllm
        self.chain.reset(new CppKeyChain(size, options))

    @property
    def page_size(self):
        """Tokens per page."""
        return self.chain.get().page_size()

    @property
    def num_tokens(self):
        """Number of tokens so far."""
        return self.chain.get().num_tokens()

    @property
    def num_pages(self):
        """Number of complete pages so far; each has a key."""
        return self.chain.get().keys().size()

    @property
    def root(self):
        """The root key, the parent key of the first page, bytes [32]."""
        return bytes_of(self.chain.get().root())

    @property
    def keys(self):
        """The keys of all complete pages, a list of bytes [32]."""
        return keys_from(self.chain.get(), 0)

    def extend(self, tokens, extra_keys=None):
        """Append tokens.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            The keys that start in these tokens, in any order. Starts count from the first token of
            the sequence. Keys may extend past the tokens.

        Returns
        -------
        list of bytes [32]
            The keys of the pages that this call has completed.

        Raises
        ------
        ValueError
            A token outside int32, an extra key that starts outside these tokens or has a length
            below 1; with the scheme "vllm", an extra key that is not UTF-8.
        TypeError
            Tokens of another dtype, an extra key that is not (int, int, bytes).
        """
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef Prompt prompt = prompt_of(source, extra_keys, self.num_tokens, self.is_vllm)
        cdef CppKeyChain* chain = self.chain.get()
        cdef size_t before = chain.keys().size()
        prompt.extend(chain)
        return keys_from(chain, before)

    def truncate(self, num_pages):
        """Cut the sequence to its first pages, to continue with other tokens.

        Raises
        ------
        ValueError
            `num_pages` is outside 0 .. the ``num_pages`` of the chain.
        """
        cdef int64_t n = as_int(num_pages, "num_pages")
        if not 0 <= n <= <int64_t>self.chain.get().keys().size():
            raise ValueError(f"num_pages is {n}, must be 0 .. {self.chain.get().keys().size()}")
        self.chain.get().truncate(n)

    def copy(self):
        """Return an independent copy of the chain, for example for a fork; O(pages)."""
        cdef KeyChain made = KeyChain.__new__(KeyChain, 1)
        made.is_vllm = self.is_vllm
        made.chain.reset(new CppKeyChain(self.chain.get()[0]))
        return made

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    def __repr__(self):
        return (
            f"KeyChain(page_size={self.page_size}, num_tokens={self.num_tokens}, "
            f"num_pages={self.num_pages})"
        )


def page_keys(
    tokens, page_size, *, extra_key=None, cache_salt=None, seed=None, extra_keys=None,
    prompt_embeds=None, scheme="kvcore"
):
    """Return the keys of a sequence's complete pages.

    Parameters
    ----------
    tokens : list of int, or array int32 or int64 [n]
        The sequence. Tokens after its last complete page do not count.
    page_size : int
        Tokens per page.
    extra_key, cache_salt : str, optional
        Prefix-cache namespace, as of a context. With "vllm" the name of a LoRA, and the salt.
    seed : str, bytes or int, optional
        Users of one store with different seeds do not find each other's pages. With "vllm", the
        value of ``PYTHONHASHSEED`` of vLLM; None if that is not set.
    extra_keys : list of (int, int, bytes), optional
        Start, length and content of inputs other than token ids, as for a context.
    prompt_embeds : array [m, elements], optional
        With "vllm", embeddings in place of the first `m` tokens; the keys depend on their bytes.
    scheme : str
        "kvcore", or "vllm" for the keys of vLLM with ``--prefix-caching-hash-algo sha256_cbor``.

    Returns
    -------
    list of bytes [32]

    Raises
    ------
    ValueError
        A `page_size` below 1, a token outside int32, an unknown scheme; an extra key that starts
        past the tokens or has a length below 1; with "vllm" an extra key that is not UTF-8.
    TypeError
        Tokens of another dtype; a namespace, seed, scheme or extra key of another type.

    Notes
    -----
    Keys are the same in every process, whatever its PYTHONHASHSEED. Costs O(tokens) and releases
    the GIL.

    Examples
    --------
    >>> from kvcore.keys import page_key, page_keys, root_key
    >>> keys = page_keys([1, 2, 3, 4, 5], 2)
    >>> keys == [page_key(root_key(), [1, 2]), page_key(keys[0], [3, 4])]
    True
    """
    cdef KeyChain made = KeyChain(
        page_size, extra_key=extra_key, cache_salt=cache_salt, seed=seed,
        prompt_embeds=prompt_embeds, scheme=scheme,
    )
    cdef Prompt prompt = prompt_of(as_tokens(tokens), extra_keys, 0, made.is_vllm)
    cdef CppKeyChain* chain = made.chain.get()  # no other thread has it
    with nogil:
        prompt.extend(chain)
    return keys_from(chain, 0)
