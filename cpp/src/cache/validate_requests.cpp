// SPDX-License-Identifier: Apache-2.0
#include "cache/validate_requests.hpp"

#include <algorithm>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"

namespace kvcore {
namespace {

constexpr const char* kRemedy =
    "truncate to a token with a checkpoint, or release the request and claim again; "
    "max_draft_tokens, with two num_states for each request, keeps the state before drafts";

void require_state(const CacheData& state, std::int64_t start, SequenceHandle handle,
                   std::int64_t row) {
    if (state.states.can_go_on(handle, start)) return;
    const RecurrentState& known = state.states.of(handle);
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx is ", start, ", but the request's state is that of token ",
                            known.run > known.at ? known.run : known.at, "; ", kRemedy));
}

}  // namespace

namespace rules {

void refuse_indices(const RequestView& request, std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat("start_idx ", request.start, ", active_idx ", request.active, ", end_idx ",
                       request.end, " break 0 <= start < active <= end; set the indices first"));
}

void refuse_length(const CacheData& state, const RequestView& request, std::int64_t row,
                   std::int64_t num_steps) {
    const CacheConfig& config = state.config;
    if (request.end > state.most_pooled_tokens()) {
        throw InRow<CapacityError>(
            row, detail::concat(request.end, " tokens need ", state.least_pages(request.end),
                                " pages, more than the whole pool of ", config.num_pages,
                                "; give the pool more memory"));
    }
    const auto length =
        static_cast<std::uint64_t>(request.end) + static_cast<std::uint64_t>(num_steps) - 1;
    throw InRow<CapacityError>(
        row, detail::concat(request.end, " tokens + ", num_steps, " steps - 1 = ", length,
                            " exceed max_seq_len ", config.max_seq_len,
                            "; end the request or run fewer steps"));
}

void refuse_repetition(std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row, detail::concat("row ", row,
                            " repeats a request of an earlier row of the batch; "
                            "name each request once"));
}

void refuse_pending(std::int64_t row) {
    throw InRow<PendingTransfersError>(row, "copies into its pages are pending; finish them first");
}

void refuse_options(const ReserveOptions& options) {
    const bool is_hit = options.max_hit < 0;
    const bool is_free = options.keep_free < 0;
    const char* name = is_hit ? "max_hit" : is_free ? "keep_free" : "must_fit";
    const std::int64_t value = is_hit    ? options.max_hit
                               : is_free ? options.keep_free
                                         : options.must_fit;
    throw std::invalid_argument(detail::concat(name, " is ", value, ", must be at least 0"));
}

void require_fit(const CacheData& state, const Sequence& sequence, const RequestView& request,
                 const ReserveOptions& options, std::int64_t row) {
    const std::int64_t tokens = options.must_fit;
    const std::int64_t most = state.most_tokens(1);
    if (tokens > most) {
        throw InRow<CapacityError>(
            row, detail::concat("must_fit is ", tokens, " tokens, must be at most ", most,
                                ": the limit of max_seq_len and the pool of ",
                                state.config.num_pages, " pages; ask for less"));
    }
    if (!state.config.quotas.empty()) {
        quotas::require_ceiling(state, sequence, request, std::max(tokens, request.end), row,
                                options.max_hit);
    }
}

void require_steps(std::int64_t num_steps) {
    if (num_steps >= 1) return;
    throw std::invalid_argument(detail::concat("num_steps is ", num_steps, ", must be at least 1"));
}

void require_namespace(const CacheConfig& config, const Sequence& sequence,
                       const RequestView& request, std::int64_t row) {
    TreeNode* node = sequence.pages.node();
    if (sequence.is_sealed() || node == nullptr || !config.prefix_caching) return;
    if (PrefixTree::name_of(node) == request.name_space) return;
    throw InRow<std::invalid_argument>(
        row,
        "the claim began in another namespace and has pages of it; "
        "release it and claim again to change extra_key or cache_salt");
}

void refuse_cut(const RequestView& request, const Admission& admission, std::int64_t num_steps,
                std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row, detail::concat("num_steps is ", num_steps, ", must be 1: the state of token ",
                            admission.active, " is needed, before active_idx ", request.active,
                            "; run that chunk with one step"));
}

void require_windows(const CacheData& state, const Sequence& sequence, std::int64_t start,
                     SequenceHandle handle, std::int64_t row) {
    if (state.states.exist()) {
        require_state(state, start, handle, row);
        start = state.states.begin_of(handle, start);
    }
    if (state.grouping.is_plain() || sequence.pages.empty()) return;
    if (state.windows.can_read(handle, start)) return;
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx ", start,
                            " lies where windows have given their pages back; set it no further "
                            "back than truncate may go, or release the request and claim again"));
}

void require_run(const CacheData& state, const RequestView& request, std::int64_t row) {
    if (state.states.can_run(request.sequence, request.start)) return;
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx is ", request.start,
                            ", as when the request was fetched, but tokens up to ",
                            state.states.of(request.sequence).run,
                            " may be in its state since; commit what ran, ", kRemedy));
}

void require_transfers(const CacheData& state, Transfers* transfers) {
    if (transfers == nullptr) {
        throw std::invalid_argument(
            detail::concat("transfers are missing, must be given to a manager with ",
                           state.config.host_pages, " host pages"));
    }
    if (!transfers->empty()) {
        throw std::invalid_argument(detail::concat("transfers hold copies of ticket ",
                                                   transfers->ticket,
                                                   ", must be empty; finish and clear them first"));
    }
    const std::size_t listed = state.copy_list.size() + state.state_copies.list_size();
    if (listed > 0) {
        throw std::invalid_argument(
            detail::concat("transfers are given, but ", listed,
                           " copies are on the list; call take_copies first, and use one of both"));
    }
    transfers->clear();  // a call that gave out nothing may have moved requests
}

}  // namespace rules

BatchRules BatchRows::begin(std::int64_t num_steps) {
    rules::require_steps(num_steps);
    const SequenceTable::Live sequences = state_.sequences.live();
    if (++stamp_ == 0) {  // once in 2^32 calls; 0 is the stamp of a sequence in no batch yet
        for (Sequence& sequence : sequences) sequence.batch_stamp = 0;
        stamp_ = 1;
    }
    return {state_, sequences, num_steps, state_.most_tokens(num_steps), stamp_};
}

void BatchRows::check(const RequestBatch& batch, std::int64_t num_steps) {
    const BatchRules known = begin(num_steps);
    resize(batch.size());
    for (std::int64_t row = 0; row < batch.size(); ++row) {
        Sequence& sequence = known.checked(batch[row], row);
        rules::require_namespace(state_.config, sequence, batch[row], row);
        rules::require_windows(state_, sequence, batch[row], row);
        if (!state_.config.quotas.empty()) {
            quotas::require_ceiling(state_, sequence, batch[row], batch[row].end, row);
        }
        set(row, sequence);
    }
}

}  // namespace kvcore
