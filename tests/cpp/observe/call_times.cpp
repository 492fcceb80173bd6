// SPDX-License-Identifier: Apache-2.0
// Call durations: buckets, and the times at which calls count at all.
#include "kvcore/metrics.hpp"

#include <chrono>
#include <cmath>

#include "support/check.hpp"

namespace tests::observe::call_times {

using kvcore::CallTimes;
using kvcore::LatencyHistogram;

namespace {

TEST(a_bucket_ends_at_its_bound) {
    LatencyHistogram histogram;
    for (const std::int64_t bound : LatencyHistogram::kBounds) {
        histogram.add(bound, LatencyHistogram::kBounds);
        histogram.add(bound + 1, LatencyHistogram::kBounds);
    }
    const LatencyHistogram::Counts& counts = histogram.counts();
    CHECK_EQ(counts.front(), 1);
    CHECK_EQ(counts.back(), 1);
    for (std::size_t i = 1; i + 1 < counts.size(); ++i) CHECK_EQ(counts[i], 2);
    CHECK(histogram.ticks() > 0);
    histogram.reset();
    CHECK_EQ(histogram.ticks(), 0);
    for (const std::int64_t count : histogram.counts()) CHECK_EQ(count, 0);
}

TEST(bounds_rise_from_a_microsecond_to_a_second) {
    CHECK_EQ(LatencyHistogram::bound(0), 1e-6);
    for (std::size_t i = 1; i < LatencyHistogram::kBounds.size(); ++i) {
        CHECK(LatencyHistogram::bound(i) > LatencyHistogram::bound(i - 1));
    }
    CHECK_EQ(LatencyHistogram::bound(LatencyHistogram::kBounds.size() - 1), 1.0);
    CHECK(std::isinf(LatencyHistogram::bound(LatencyHistogram::kBounds.size())));
}

std::int64_t num_calls(const CallTimes& times, CallTimes::Call call) {
    std::int64_t sum = 0;
    for (const std::int64_t count : times.of(call).counts()) sum += count;
    return sum;
}

TEST(calls_count_while_anybody_wants_to_know) {
    CallTimes times;
    const auto run = [&] { times.end(CallTimes::kFetch, times.begin()); };
    run();
    CHECK_EQ(num_calls(times, CallTimes::kFetch), 0);
    const double tick = CallTimes::measure_tick();
    times.start(tick);
    times.start(tick);
    run();
    times.stop();
    run();  // the other user of the timer still counts
    times.stop();
    run();
    CHECK_EQ(num_calls(times, CallTimes::kFetch), 2);
    CHECK_EQ(num_calls(times, CallTimes::kStep), 0);
    times.stop();  // one stop more than starts
    CHECK(!times.is_on());
    times.start(tick);
    CHECK(times.is_on());
    CHECK_EQ(num_calls(times, CallTimes::kFetch), 2);
    times.reset();
    CHECK_EQ(num_calls(times, CallTimes::kFetch), 0);
    CHECK(times.is_on());
}

// A call that spans a start or a stop is counted as a whole or not at all.
TEST(calls_across_a_start_or_stop_are_whole) {
    CallTimes times;
    const std::int64_t before = times.begin();
    times.start(CallTimes::measure_tick());
    times.end(CallTimes::kStep, before);
    CHECK_EQ(num_calls(times, CallTimes::kStep), 0);
    const std::int64_t begun = times.begin();
    times.stop();
    times.end(CallTimes::kStep, begun);
    CHECK_EQ(num_calls(times, CallTimes::kStep), 1);
    CHECK(times.seconds(CallTimes::kStep) < 10.0);
}

// Compare with the steady clock around the calls.
TEST(seconds_are_seconds) {
    CallTimes times;
    times.start(CallTimes::measure_tick());
    using Clock = std::chrono::steady_clock;
    const Clock::time_point outer = Clock::now();
    const std::int64_t begun = times.begin();
    const Clock::time_point inner = Clock::now();
    while (Clock::now() - inner < std::chrono::milliseconds(20)) continue;
    times.end(CallTimes::kReserve, begun);
    const std::chrono::duration<double> most = Clock::now() - outer;
    CHECK(times.seconds(CallTimes::kReserve) > 0.9 * 0.020);
    CHECK(times.seconds(CallTimes::kReserve) < 1.1 * most.count());
    std::int64_t below = 0;
    for (std::size_t i = 0; LatencyHistogram::bound(i) < 0.015; ++i) {
        below += times.of(CallTimes::kReserve).counts()[i];
    }
    CHECK_EQ(below, 0);
}

}  // namespace

}  // namespace tests::observe::call_times
