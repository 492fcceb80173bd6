# SPDX-License-Identifier: Apache-2.0
"""The arguments of chained page keys: items, namespaces, seeds, tokens with extra keys."""


# Nesting depth of the lists in an extra.
cdef int MOST_DEPTH = 16


cdef bytes utf8_of(object text):
    # A str may contain lone surrogates; different strings must have different bytes.
    return (<str>text).encode("utf-8", "surrogatepass")


cdef int put_item(string& out, object item, str name, int depth) except -1:
    """Append None, an int, a str, bytes, a list or a tuple as one item of canonical CBOR."""
    cdef Py_ssize_t i
    cdef tuple items
    cdef bytes held  # keeps the bytes alive until they are appended
    if item is None:
        put_nil(out)
    elif isinstance(item, str):
        held = utf8_of(item)
        put_text(out, name_view(held))
    elif isinstance(item, bytes):
        put_bytes(out, name_view(<bytes>item))
    elif isinstance(item, (list, tuple)):
        if depth == MOST_DEPTH:
            raise ValueError(f"{name} is a list {depth} lists deep, must be at most {depth - 1}")
        items = tuple(item)
        put_array(out, len(items))
        for i in range(len(items)):
            put_item(out, items[i], f"{name}[{i}]", depth + 1)
    elif PyIndex_Check(item) and not isinstance(item, bool):
        put_integer(out, as_int(item, name))
    else:
        raise TypeError(
            f"{name} is a {type(item).__name__}, must be None, an int, a str, bytes, or a list or "
            f"tuple of these"
        )
    return 0


cdef int64_t as_page_size(object page_size) except -1:
    cdef int64_t size = as_int(page_size, "page_size")
    if not 1 <= size <= INT32_HIGH:
        raise ValueError(f"page_size is {size}, must be 1 .. {INT32_HIGH} tokens")
    return size


cdef KeyScheme as_scheme(object scheme) except *:
    if not isinstance(scheme, str):
        raise TypeError(f"scheme is a {type(scheme).__name__}, must be 'kvcore' or 'vllm'")
    if scheme == "kvcore":
        return KeyScheme.kKvcore
    if scheme == "vllm":
        return KeyScheme.kVllm
    raise ValueError(f"scheme is {scheme!r}, must be 'kvcore' or 'vllm'")


cdef int put_seed(string& out, object seed, bint is_vllm) except -1:
    """Append the seed as an item; nothing for None."""
    if seed is None:
        return 0
    cdef bint is_int = PyIndex_Check(seed) and not isinstance(seed, bool)
    if not is_int and not isinstance(seed, str) and (is_vllm or not isinstance(seed, bytes)):
        kinds = "a str or an int" if is_vllm else "a str, bytes or an int"
        raise TypeError(f"seed is a {type(seed).__name__}, must be {kinds}, or None")
    # With the scheme "vllm", the seed is the text of an environment variable.
    return put_item(out, str(as_int(seed, "seed")) if is_vllm and is_int else seed, "seed", 0)


cdef cnp.ndarray as_rows(object prompt_embeds):
    if not cnp.PyArray_Check(prompt_embeds):
        raise TypeError(
            f"prompt_embeds is a {type(prompt_embeds).__name__}, must be an array "
            f"[tokens, elements]; pass the bytes of a tensor, tensor.view(uint8).numpy()"
        )
    cdef cnp.ndarray rows = prompt_embeds
    if cnp.PyArray_NDIM(rows) != 2:
        raise ValueError(
            f"prompt_embeds have shape {prompt_embeds.shape}, must be [tokens, elements]"
        )
    if prompt_embeds.dtype.hasobject:
        raise TypeError(f"prompt_embeds have dtype {prompt_embeds.dtype}, must be a numeric dtype")
    return cnp.PyArray_GETCONTIGUOUS(rows)


cdef KeyOptions as_options(
    object extra_key, object cache_salt, object seed, object scheme, object prompt_embeds,
    int64_t page_size
) except *:
    cdef KeyOptions options
    cdef cnp.ndarray rows
    options.scheme = as_scheme(scheme)
    for name, key in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if key is not None and not isinstance(key, str):
            raise TypeError(f"{name} is a {type(key).__name__}, must be a str or None")
    if extra_key is not None:
        options.extra_key = <string>utf8_of(extra_key)
    if cache_salt is not None:
        options.cache_salt = <string>utf8_of(cache_salt)
    put_seed(options.seed, seed, options.scheme == KeyScheme.kVllm)
    if prompt_embeds is not None:
        if options.scheme != KeyScheme.kVllm:
            raise ValueError(
                "prompt_embeds are given with scheme 'kvcore', must be None; give a digest of them "
                "as an extra key"
            )
        rows = as_rows(prompt_embeds)
        options.embeddings = embedding_digests(
            <const byte*>cnp.PyArray_DATA(rows), cnp.PyArray_DIM(rows, 0),
            cnp.PyArray_DIM(rows, 1) * cnp.PyArray_ITEMSIZE(rows), page_size,
        )
    return options


cdef int require_utf8(bytes key) except -1:
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"extra_keys holds {key!r}, must be UTF-8 with scheme 'vllm'; pass the identifier as "
            f"text.encode()"
        ) from None
    return 0


@cython.final
cdef class Prompt:
    """Tokens with the extra keys that start in them, in the form of the C++ library."""

    cdef cnp.ndarray tokens
    cdef tuple keys  # `placed` points to their bytes
    cdef vector[PlacedKey] placed

    cdef int extend(self, CppKeyChain* chain) except -1 nogil:
        chain.extend(
            <const int32_t*>cnp.PyArray_DATA(self.tokens), cnp.PyArray_DIM(self.tokens, 0),
            self.placed.data(), self.placed.size(),
        )
        return 0


cdef Prompt prompt_of(cnp.ndarray tokens, object extra_keys, int64_t first, bint is_vllm):
    """Return the tokens that follow the first `first` tokens of a sequence, with checked keys."""
    cdef Prompt made = Prompt.__new__(Prompt)
    cdef PlacedKey each
    cdef int64_t end = first + cnp.PyArray_DIM(tokens, 0)
    made.tokens = tokens
    made.keys = as_extra_keys(extra_keys, end, False) or ()
    for start, length, key in made.keys:
        if start < first:
            raise ValueError(
                f"extra_keys has a key that starts at {start}, must be {first} .. {end - 1}: the "
                f"tokens before {first} are hashed already; pass a key with its first token"
            )
        if is_vllm:
            require_utf8(key)
        each.start, each.length, each.bytes = start, length, name_view(key)
        made.placed.push_back(each)
    return made


cdef PageKey as_page_key(object key) except *:
    cdef PageKey found
    cdef Py_ssize_t size
    if not isinstance(key, bytes):
        raise TypeError(
            f"parent is a {type(key).__name__}, must be bytes; pass root_key(...) for a first page"
        )
    size = PyBytes_GET_SIZE(key)  # not len(), which a subclass may override
    if size != <Py_ssize_t>found.size():
        raise ValueError(
            f"parent has {size} bytes, must have {found.size()}; pass a whole key, or "
            f"root_key(...) for a first page"
        )
    memcpy(found.data(), PyBytes_AS_STRING(key), found.size())
    return found
