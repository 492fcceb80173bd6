// SPDX-License-Identifier: Apache-2.0
// The CPU kernels' verbs on NVIDIA GPUs, with the same bytes as result.
//
// Common to all: every pointer of a view, a table or a list names memory of the stream's device (or
// pinned host memory); scalars are host values. The caller has checked sizes and dtypes; sources
// and destinations do not overlap. A call enqueues work on its stream and returns a status: it
// allocates nothing, waits for nothing, reads nothing back, leaves the thread's current device
// unchanged, and may be captured into a graph. A call without work succeeds without a launch. Pages
// and slots are read on the device. An id outside the pool (negative or too large) is skipped on
// the device: for that id, no memory inside or outside the pool is read or written. If a call has
// `bad` and it is not nullptr, the call counts in it the pages and slots beyond the pool, but not
// slots below 0, which are padding. The rows of skipped tokens must exist, because kernels may read
// them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/attention.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/page_bytes.hpp"
#include "kvcore/paged_batch.hpp"
#include "kvcore/quantize.hpp"

namespace kvcore::cuda {

// Devices, streams, events and memory of NVIDIA GPUs, as far as a KV cache needs them. This header
// needs no CUDA header: handles are CUDA's own, as void*.
//
// Common to all: a call returns a status, 0 for success; it never throws, leaves the calling
// thread's current device unchanged, and creates a context only on the device in its arguments.
// Without a driver, every call returns a status that reports the missing driver.

/// 0, a cudaError_t, or kInvalidCall.
using Status = int;
constexpr Status kSuccess = 0;
/// Sizes that no kernel accepts: more work than a grid holds, a negative count.
constexpr Status kInvalidCall = -1;

/// The meaning of a status, for error texts: CUDA's message and the number. Never nullptr; valid
/// forever.
[[nodiscard]] const char* status_text(Status status) noexcept;

/// A stream of a device: cudaStream_t, nullptr for the device's legacy default stream. Owns
/// nothing.
struct Stream {
    int device = 0;
    void* handle = nullptr;
};

/// An event of a device, without timing: cudaEvent_t. Owns nothing.
struct Event {
    int device = 0;
    void* handle = nullptr;
};

/// Counts the devices that the driver shows. With a status other than 0, `count` stays 0 and the
/// status gives the reason ("CUDA driver version is insufficient" without a driver).
[[nodiscard]] Status count_devices(int* count) noexcept;

/// Makes a device's context current on the calling thread until `leave_device` is called, so that
/// direct CUDA calls and other libraries use it. `has_entered` is false if the context is already
/// current: then do not call `leave_device`.
[[nodiscard]] Status enter_device(int device, bool* has_entered) noexcept;
Status leave_device() noexcept;

/// The device whose memory a pointer names, or -1 for host memory that CUDA has not registered.
[[nodiscard]] Status device_of(const void* pointer, int* device) noexcept;

/// Bytes of a device's memory: free now, and in total.
[[nodiscard]] Status memory_info(int device, std::int64_t* free, std::int64_t* total) noexcept;

/// Memory of a device, aligned to at least 256 bytes. 0 bytes give nullptr.
[[nodiscard]] Status allocate(int device, std::int64_t bytes, void** pointer) noexcept;
/// Waits for the device if it must; does nothing for nullptr.
Status free_memory(int device, void* pointer) noexcept;

/// Pins the caller's host memory, so that copies run concurrently with the host, and kernels of all
/// devices can read and write the memory at its own address. The caller still owns the memory and
/// unpins it before freeing it. `device` is a device that the caller uses.
[[nodiscard]] Status pin_memory(int device, void* pointer, std::int64_t bytes) noexcept;
Status unpin_memory(int device, void* pointer) noexcept;

/// A stream that does not wait for the legacy default stream.
[[nodiscard]] Status create_stream(int device, Stream* stream) noexcept;
Status destroy_stream(Stream stream) noexcept;
/// Sets `answer` to true if work enqueued on the stream now goes into a graph that is being
/// captured.
[[nodiscard]] Status is_capturing(Stream stream, bool* answer) noexcept;
/// Blocks the host until the stream's work is done.
[[nodiscard]] Status synchronize(Stream stream) noexcept;
/// Blocks the host until all work of a device is done, including the work of destroyed streams.
[[nodiscard]] Status synchronize_device(int device) noexcept;

[[nodiscard]] Status create_event(int device, Event* event) noexcept;
Status destroy_event(Event event) noexcept;
/// Records the work that is on the stream now in the event, in place of the work recorded before.
[[nodiscard]] Status record(Event event, Stream stream) noexcept;
/// Work enqueued on the stream from now on waits for the event; the host does not.
[[nodiscard]] Status wait(Stream stream, Event event) noexcept;
/// Sets `is_done` to true if an event's work is done; does not wait.
[[nodiscard]] Status query(Event event, bool* is_done) noexcept;
/// Blocks the host until an event's work is done.
[[nodiscard]] Status synchronize(Event event) noexcept;

/// Fills bytes of a device's memory in stream order.
[[nodiscard]] Status fill(void* destination, std::byte value, std::int64_t bytes,
                          Stream stream) noexcept;

/// Copies bytes in stream order, between any two of host and devices. If host memory is not pinned,
/// the host waits.
[[nodiscard]] Status copy(void* destination, const void* source, std::int64_t bytes,
                          Stream stream) noexcept;

/// Copies bytes[i] bytes from sources[i] to destinations[i] (host arrays [n], read before the call
/// returns), in any order, by the copy engines. A destination shares no byte with another
/// destination or a source, and each run is inside one allocation. If the driver supports batches
/// (CUDA 12.8) and the stream is not the legacy default stream, the call makes one driver call per
/// 512 runs.
[[nodiscard]] Status copy_batch(void* const* destinations, const void* const* sources,
                                const std::int64_t* bytes, std::int64_t n, Stream stream) noexcept;

// ---- tokens into pages, and out of them ---------------------------------------------------------

/// As kvcore::append_slots: token i of k and v (not read where the pool has no values) to slots[i],
/// i < n. k and v may be longer than the slots. Cost: the bytes.
[[nodiscard]] Status append_slots(const PoolView<std::byte>& pool,
                                  const TokenRows<const std::byte>& k,
                                  const TokenRows<const std::byte>& v, const std::int64_t* slots,
                                  std::int64_t n, std::int32_t* bad, Stream stream) noexcept;
[[nodiscard]] Status append_slots(const PoolView<std::byte>& pool,
                                  const TokenRows<const std::byte>& k,
                                  const TokenRows<const std::byte>& v, const std::int32_t* slots,
                                  std::int64_t n, std::int32_t* bad, Stream stream) noexcept;

/// Batches whose table and ranges are on the device. `num_tokens` is an upper bound of
/// offsets[batch]: later tokens are padding, so a captured graph may serve smaller batches.
struct DeviceBatch {
    PageTable table;
    TokenRanges ranges;
    std::int64_t num_tokens;
    std::int64_t num_pages;  // of the pool
};

/// As kvcore::append_batch of bytes; `pool.blocks` are not read.
[[nodiscard]] Status append_batch(TokenShape shape, const PagedRows<std::byte>& pool,
                                  const DeviceBatch& batch,
                                  const TokenRows<const std::byte>& source, std::int32_t* bad,
                                  Stream stream) noexcept;
/// As kvcore::gather_batch of bytes. Tokens without a page are left as they were.
[[nodiscard]] Status gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool,
                                  const DeviceBatch& batch, const TokenRows<std::byte>& destination,
                                  std::int32_t* bad, Stream stream) noexcept;

/// Rows of tokens, and the pool that they are written to or, if the pool is const, read from.
template <class PoolByte, class RowByte>
struct TokenMove {
    TokenShape shape;
    PagedRows<PoolByte> pool;
    TokenRows<RowByte> rows;
};
/// K and V of a batch, from or to pools with the batch's pages and the same page size, in one
/// launch if K and V can be moved in units of the same size. `bad` counts a token once.
[[nodiscard]] Status append_batch(const TokenMove<std::byte, const std::byte>& k,
                                  const TokenMove<std::byte, const std::byte>& v,
                                  const DeviceBatch& batch, std::int32_t* bad,
                                  Stream stream) noexcept;
[[nodiscard]] Status gather_batch(const TokenMove<const std::byte, std::byte>& k,
                                  const TokenMove<const std::byte, std::byte>& v,
                                  const DeviceBatch& batch, std::int32_t* bad,
                                  Stream stream) noexcept;

/// As kvcore::append_batch and gather_batch with another dtype, and for latent rows.
[[nodiscard]] Status append_batch(PageShape shape, const PagedTensor<std::byte>& pool,
                                  const DeviceBatch& batch,
                                  const TokenRows<const std::byte>& source, DType wide,
                                  Scales scales, std::int32_t* bad, Stream stream) noexcept;
/// The same into a narrow pool without scales: `scale` is the scale of all codes.
[[nodiscard]] Status append_batch(PageShape shape, const PagedTensor<std::byte>& pool,
                                  const DeviceBatch& batch,
                                  const TokenRows<const std::byte>& source, DType wide, float scale,
                                  std::int32_t* bad, Stream stream) noexcept;
[[nodiscard]] Status gather_batch(PageShape shape, const PagedTensor<const std::byte>& pool,
                                  const DeviceBatch& batch, const TokenRows<std::byte>& destination,
                                  DType wide, std::int32_t* bad, Stream stream) noexcept;

/// K and V, whose pools have the same number of pages.
template <class Tensor>
struct TensorPair {
    Tensor k;
    Tensor v;
};
/// The same for K and V: in one launch, which looks up each token once, if the pools have the same
/// narrow dtype and K and V agree in shape, scales and alignment; otherwise in two launches. Tokens
/// without a page are counted once.
[[nodiscard]] Status append_batch(PageShape shape, const TensorPair<PagedTensor<std::byte>>& pools,
                                  const DeviceBatch& batch,
                                  const TensorPair<TokenRows<const std::byte>>& sources, DType wide,
                                  Scales scales, std::int32_t* bad, Stream stream) noexcept;
[[nodiscard]] Status append_batch(PageShape shape, const TensorPair<PagedTensor<std::byte>>& pools,
                                  const DeviceBatch& batch,
                                  const TensorPair<TokenRows<const std::byte>>& sources, DType wide,
                                  TensorPair<float> scales, std::int32_t* bad,
                                  Stream stream) noexcept;
[[nodiscard]] Status gather_batch(PageShape shape,
                                  const TensorPair<PagedTensor<const std::byte>>& pools,
                                  const DeviceBatch& batch,
                                  const TensorPair<TokenRows<std::byte>>& destinations, DType wide,
                                  std::int32_t* bad, Stream stream) noexcept;

[[nodiscard]] Status append_latent(const PoolView<std::byte>& pool, const DeviceBatch& batch,
                                   const TokenRows<const std::byte>& source, DType wide,
                                   std::int32_t* bad, Stream stream) noexcept;
[[nodiscard]] Status gather_latent(const PoolView<const std::byte>& pool, const DeviceBatch& batch,
                                   const TokenRows<std::byte>& destination, DType wide,
                                   std::int32_t* bad, Stream stream) noexcept;

// ---- pages --------------------------------------------------------------------------------------

// `num_pages` and PageCounts are numbers of pages of a pool: only ids below them are copied.

/// As kvcore::copy_pages; `pairs` [n] on the device.
[[nodiscard]] Status copy_pages(const PageBytes<std::byte>& pool, std::int64_t num_pages,
                                const PagePair* pairs, std::int64_t n, Stream stream) noexcept;
/// As kvcore::fill_pages; `ids` [n] on the device.
[[nodiscard]] Status fill_pages(const PageBytes<std::byte>& pool, std::int64_t num_pages,
                                const std::int64_t* ids, std::int64_t n, std::byte value,
                                Stream stream) noexcept;
/// As kvcore::digest_pages; `ids` and `digests` [n] on the device. The digest of an id outside the
/// pool is 0.
[[nodiscard]] Status digest_pages(const PageBytes<const std::byte>& pool, std::int64_t num_pages,
                                  const std::int64_t* ids, std::int64_t n, std::uint64_t* digests,
                                  Stream stream) noexcept;
/// Adds `weight` times the digests of pages to `digests`, to combine the digests of several pools.
[[nodiscard]] Status add_digests(const PageBytes<const std::byte>& pool, std::int64_t num_pages,
                                 const std::int64_t* ids, std::int64_t n, std::uint64_t weight,
                                 std::uint64_t* digests, Stream stream) noexcept;
/// As kvcore::copy_partial; `copies` [n] on the device. At most a page of tokens is copied.
[[nodiscard]] Status copy_partial(const CacheView<std::byte>& pool, std::int64_t num_pages,
                                  const PageStart* copies, std::int64_t n, Stream stream) noexcept;

/// Pages of both caches of a transfer.
struct PageCounts {
    std::int64_t source;
    std::int64_t destination;
};
/// As kvcore::transfer; `pairs` [n] on the device. If a view has `layers`, they are a host array,
/// which is read before the call returns; the same holds for `copy_partial`.
/// Either cache may be in pinned host memory. At most `max_blocks` thread blocks are used, so that
/// a model can run at the same time; 0: as many as are useful.
[[nodiscard]] Status transfer(const CacheView<const std::byte>& source,
                              const CacheView<std::byte>& destination, PageCounts pages,
                              const PagePair* pairs, std::int64_t n, LayerRange layers,
                              std::int64_t max_blocks, Stream stream) noexcept;
/// The same with two lists [n] on the device.
[[nodiscard]] Status transfer(const CacheView<const std::byte>& source,
                              const CacheView<std::byte>& destination, PageCounts pages,
                              const std::int64_t* source_ids, const std::int64_t* destination_ids,
                              std::int64_t n, LayerRange layers, std::int64_t max_blocks,
                              Stream stream) noexcept;
/// As kvcore::transfer_to_packed and transfer_from_packed; otherwise as `transfer`. One launch if K
/// has units of 16 bytes, page size and units of V are multiples of 8 (of 4 for elements of four
/// bytes), and all strides and addresses are multiples of 16. Otherwise one launch each for K and
/// V, where V is moved by the element: the bytes of V then count several times in the cost.
[[nodiscard]] Status transfer_to_packed(const CacheView<const std::byte>& source,
                                        const PackedCacheView<std::byte>& destination,
                                        PageCounts pages, const PagePair* pairs, std::int64_t n,
                                        LayerRange layers, std::int64_t max_blocks,
                                        Stream stream) noexcept;
[[nodiscard]] Status transfer_to_packed(const CacheView<const std::byte>& source,
                                        const PackedCacheView<std::byte>& destination,
                                        PageCounts pages, const std::int64_t* source_ids,
                                        const std::int64_t* destination_ids, std::int64_t n,
                                        LayerRange layers, std::int64_t max_blocks,
                                        Stream stream) noexcept;
[[nodiscard]] Status transfer_from_packed(const PackedCacheView<const std::byte>& source,
                                          const CacheView<std::byte>& destination, PageCounts pages,
                                          const PagePair* pairs, std::int64_t n, LayerRange layers,
                                          std::int64_t max_blocks, Stream stream) noexcept;
[[nodiscard]] Status transfer_from_packed(const PackedCacheView<const std::byte>& source,
                                          const CacheView<std::byte>& destination, PageCounts pages,
                                          const std::int64_t* source_ids,
                                          const std::int64_t* destination_ids, std::int64_t n,
                                          LayerRange layers, std::int64_t max_blocks,
                                          Stream stream) noexcept;

// ---- tables and lengths of a step ---------------------------------------------------------------

/// As kvcore::build_slots.
[[nodiscard]] Status build_slots(const PageTable& table, const TokenRanges& ranges,
                                 std::int64_t page_size, std::int64_t num_pages,
                                 std::int64_t* slots, std::int64_t capacity,
                                 Stream stream) noexcept;
[[nodiscard]] Status build_slots(const PageTable& table, const TokenRanges& ranges,
                                 std::int64_t page_size, std::int64_t num_pages,
                                 std::int32_t* slots, std::int64_t capacity,
                                 Stream stream) noexcept;
/// As kvcore::advance_lengths.
[[nodiscard]] Status advance_lengths(const std::uint32_t* lengths, const std::uint32_t* offsets,
                                     const std::uint8_t* active, std::uint32_t* advanced,
                                     std::int64_t batch, Stream stream) noexcept;

/// As kvcore::compact_table, in one launch; `kept` [n] on the device. A lane moves a column, eight
/// rows at a time: eight rows cost one round trip to memory, and almost nothing if they are already
/// in their place.
[[nodiscard]] Status compact_table(const BatchRows& batch, const std::uint32_t* kept,
                                   std::int64_t n, Stream stream) noexcept;

/// offsets[row] = lengths[0] + ... + lengths[row - 1], 0 <= row <= batch. Cost: batch^2 / 2 loads,
/// which warps share.
[[nodiscard]] Status row_offsets(const std::uint32_t* lengths, std::uint32_t* offsets,
                                 std::int64_t batch, Stream stream) noexcept;

/// A change of one entry of a page table.
struct TableEdit {
    std::uint32_t row;
    std::uint32_t column;
    std::uint32_t page;
};
/// Writes edits [n] to a table [rows, columns] in place; no two edits name the same entry. Edits
/// outside the table are skipped and counted.
[[nodiscard]] Status update_table(std::uint32_t* table, std::int64_t row_stride, std::int64_t rows,
                                  std::int64_t columns, const TableEdit* edits, std::int64_t n,
                                  std::int32_t* bad, Stream stream) noexcept;

// ---- arrays -------------------------------------------------------------------------------------

/// Strides of an axis, in bytes of any sign.
struct StridedAxis {
    std::int64_t size;
    std::int64_t from;
    std::int64_t to;
};
/// Items along axes, the outermost first.
struct StridedCopy {
    static constexpr int kMostAxes = 8;
    std::int64_t item_bytes = 0;
    int num_axes = 0;
    StridedAxis axes[kMostAxes] = {};
};
/// Copies items to other strides; `source` and `destination` are the addresses of the first item.
[[nodiscard]] Status copy_strided(const StridedCopy& copy, const std::byte* source,
                                  std::byte* destination, Stream stream) noexcept;

// ---- dtypes -------------------------------------------------------------------------------------

/// As the functions of kvcore/quantize.hpp.
[[nodiscard]] Status quantize(Groups shape, DType wide, const std::byte* source, DType narrow,
                              std::byte* codes, float* scales, Stream stream) noexcept;
[[nodiscard]] Status quantize(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                              std::byte* codes, float* scales, Stream stream) noexcept;
[[nodiscard]] Status quantize_by(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                                 std::byte* codes, const float* scales, Stream stream) noexcept;
[[nodiscard]] Status dequantize(Groups shape, DType narrow, const std::byte* codes,
                                const float* scales, DType wide, std::byte* destination,
                                Stream stream) noexcept;
[[nodiscard]] Status dequantize(HeadRows shape, DType narrow, const std::byte* codes,
                                const float* scales, DType wide, std::byte* destination,
                                Stream stream) noexcept;

// ---- nvfp4 --------------------------------------------------------------------------------------
// As the functions of kvcore/quantize.hpp; `GlobalScale::at` is read on the device. Fastest if
// addresses and strides of rows are multiples of 16 for wide elements, and multiples of 8 for
// codes.

[[nodiscard]] Status quantize_nvfp4(std::int64_t blocks, DType wide, const std::byte* source,
                                    GlobalScale global, std::byte* codes, std::byte* scales,
                                    Stream stream) noexcept;
[[nodiscard]] Status dequantize_nvfp4(std::int64_t blocks, const std::byte* codes,
                                      const std::byte* scales, GlobalScale global, DType wide,
                                      std::byte* destination, Stream stream) noexcept;
/// K and V in one launch if their heads have the same length; with `dim` 0 of V, only K. `bad`
/// counts a token once.
[[nodiscard]] Status append_batch(PageShape shape, const TensorPair<Nvfp4Tensor<std::byte>>& pools,
                                  const DeviceBatch& batch,
                                  const TensorPair<TokenRows<const std::byte>>& sources, DType wide,
                                  std::int32_t* bad, Stream stream) noexcept;
[[nodiscard]] Status gather_batch(PageShape shape,
                                  const TensorPair<Nvfp4Tensor<const std::byte>>& pools,
                                  const DeviceBatch& batch,
                                  const TensorPair<TokenRows<std::byte>>& destinations, DType wide,
                                  std::int32_t* bad, Stream stream) noexcept;
[[nodiscard]] Status append_slots(const Nvfp4Pool<std::byte>& pool,
                                  const TokenRows<const std::byte>& k,
                                  const TokenRows<const std::byte>& v, DType wide,
                                  const std::int64_t* slots, std::int64_t n, std::int32_t* bad,
                                  Stream stream) noexcept;
[[nodiscard]] Status append_slots(const Nvfp4Pool<std::byte>& pool,
                                  const TokenRows<const std::byte>& k,
                                  const TokenRows<const std::byte>& v, DType wide,
                                  const std::int32_t* slots, std::int64_t n, std::int32_t* bad,
                                  Stream stream) noexcept;

// ---- attention ----------------------------------------------------------------------------------

/// As kvcore::merge_states, within rounding.
[[nodiscard]] Status merge_states(std::int64_t n, std::int64_t dim, DType dtype, AttentionStates a,
                                  AttentionStates b, std::byte* values, float* lse,
                                  Stream stream) noexcept;

}  // namespace kvcore::cuda
