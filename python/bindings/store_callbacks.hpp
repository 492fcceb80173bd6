// SPDX-License-Identifier: Apache-2.0
// Stores of Python classes as lower stores, and the hooks of a StoreReader: they call functions of
// Cython, which take the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/lower_store.hpp"
#include "kvcore/python_errors.hpp"

namespace kvcore::python {

/// A function of Cython raised: the Python error is set in this thread.
struct PythonRaised {};

/// Throws PythonRaised if the result of a function of Cython says that it raised.
inline std::int64_t checked(std::int64_t result) {
    if (result < 0) throw PythonRaised();
    return result;
}

/// Keeps the Python error of a PythonRaised, or sets the error of another exception. Call it in a
/// catch block.
inline void translate_load_error() {
    try {
        throw;
    } catch (const PythonRaised&) {
        return;
    } catch (...) {
        translate_exception();
    }
}

/// The hooks as functions; `self` is their first argument. A negative result: the function raised.
struct HookFunctions {
    int (*prepare)(void* self, const StoreMoves& fill);
    int (*make_room)(void* self);
    int (*check_interrupt)(void* self);
};

class CallbackHooks final : public StoreHooks {
   public:
    CallbackHooks(void* self, HookFunctions functions) : self_(self), functions_(functions) {}

    void prepare(const StoreMoves& fill) override { checked(functions_.prepare(self_, fill)); }
    bool make_room() override { return checked(functions_.make_room(self_)) != 0; }
    void check_interrupt() override { checked(functions_.check_interrupt(self_)); }

   private:
    void* self_;
    HookFunctions functions_;
};

/// The methods of a lower store as functions; `self` is their first argument. A negative result:
/// the function raised.
struct StoreFunctions {
    int (*parts_of)(void* self, const PageKey* keys, std::size_t n, std::uint64_t* parts);
    std::int64_t (*read)(void* self, const ColumnRange& columns, std::uint64_t* parts);
    std::int64_t (*write)(void* self, const StoreMoves& moves,
                          const std::vector<std::size_t>& columns);
    int (*remove)(void* self, const std::vector<PageKey>& keys);
};

/// A store whose reads and writes are over when they return.
class CallbackStore final : public LowerStore {
   public:
    CallbackStore(void* self, StoreFunctions functions) : self_(self), functions_(functions) {}

    void parts_of(const PageKey* keys, std::size_t n, std::uint64_t* parts) override {
        checked(functions_.parts_of(self_, keys, n, parts));
    }
    std::size_t read(const ColumnRange& columns, std::uint64_t* parts, StoreTask& /*late*/,
                     StoreHooks& /*hooks*/) override {
        return static_cast<std::size_t>(checked(functions_.read(self_, columns, parts)));
    }
    StoreWrite write(const StoreMoves& moves, const std::vector<std::size_t>& columns) override {
        StoreWrite write;
        write.stored = checked(functions_.write(self_, moves, columns));
        return write;
    }
    std::int64_t end(StoreWrite& write) override { return write.stored; }
    void remove(const std::vector<PageKey>& keys) override {
        checked(functions_.remove(self_, keys));
    }

   private:
    void* self_;
    StoreFunctions functions_;
};

}  // namespace kvcore::python
