// SPDX-License-Identifier: Apache-2.0
#include "kvcore/store_writer.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace kvcore {

StoreWriter::StoreWriter(CacheManager& manager, std::vector<LowerStore*> stores)
    : manager_(manager), stores_(std::move(stores)) {}

bool StoreWriter::take(std::int64_t most, Batch& out) {
    out.epoch = epoch_;  // read first: a later `forget` applies to the batch
    out.num_resets = manager_.num_resets();
    return manager_.take_writes(most, out.moves);
}

std::int64_t StoreWriter::write(const Batch& batch) {
    const StoreMoves& moves = batch.moves;
    // A page is in the batch twice if parts were added to it while it waited: the last one counts.
    std::map<PageKey, std::size_t> last;
    for (std::size_t i = 0; i < moves.keys.size(); ++i) last[moves.keys[i]] = i;
    std::vector<std::size_t> columns;
    std::vector<PageKey> keys;
    for (std::size_t i = 0; i < moves.keys.size(); ++i) {
        if (last[moves.keys[i]] != i) continue;
        columns.push_back(i);
        keys.push_back(moves.keys[i]);
    }
    std::vector<StoreWrite> writes;
    writes.reserve(stores_.size());
    for (LowerStore* store : stores_) writes.push_back(store->write(moves, columns));
    const auto n = static_cast<std::int64_t>(columns.size());
    std::int64_t least = n;
    std::int64_t most = 0;
    for (std::size_t i = 0; i < stores_.size(); ++i) {
        const std::int64_t stored = stores_[i]->end(writes[i]);
        least = std::min(least, stored);
        most = std::max(most, stored);
    }
    if (batch.epoch != epoch_) {  // the pages may be newer than the reset, which clears the stores
        for (LowerStore* store : stores_) store->remove(keys);
    } else if (most == n) {
        manager_.note_written(moves.replica, moves.keys.data(),
                              static_cast<std::int64_t>(moves.keys.size()), batch.num_resets);
    }
    return n - least;
}

void StoreWriter::finish(Batch& batch) noexcept {
    const std::uint64_t ticket = std::exchange(batch.moves.ticket, 0);
    if (ticket != 0) manager_.finish_writes(ticket);
}

}  // namespace kvcore
