// SPDX-License-Identifier: Apache-2.0
// Parses PTX text into instructions. The compiler writes one instruction per line.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ptx.hpp"

namespace gpu_sim {

namespace {

bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("_$%.:+-", c) != nullptr;
}

bool begins(std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
}

// Words of names, numbers and opcodes; every other character is a word.
std::vector<std::string> words_of(std::string_view line) {
    std::vector<std::string> words;
    for (std::size_t i = 0; i < line.size();) {
        if (std::isspace(static_cast<unsigned char>(line[i])) != 0) {
            ++i;
        } else if (line[i] == '"') {
            const std::size_t end = line.find('"', i + 1);
            words.emplace_back(line.substr(i + 1, end - i - 1));
            i = end + 1;
        } else if (is_word(line[i])) {
            std::size_t end = i;
            while (end < line.size() && is_word(line[end])) ++end;
            words.emplace_back(line.substr(i, end - i));
            i = end;
        } else {
            words.emplace_back(1, line[i++]);
        }
    }
    return words;
}

std::vector<std::string> split(const std::string& opcode) {
    std::vector<std::string> parts(1);
    for (const char c : opcode) {
        if (c == '.') {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

int bytes_of(const std::string& type) {
    if (type == "pred") return 1;
    const int bits = std::atoi(type.c_str() + 1);
    return std::strchr("busf", type[0]) != nullptr && bits >= 8 ? bits / 8 : 0;
}

class Parser {
   public:
    Module run(std::string_view text) {
        bool is_in_section = false;  // in debug information, at the end
        while (!text.empty()) {
            std::string_view line = text.substr(0, text.find('\n'));
            text.remove_prefix(std::min(text.size(), line.size() + 1));
            line = line.substr(0, line.find("//"));
            line_ = std::string(line);
            const std::vector<std::string> words = words_of(line);
            if (words.empty()) continue;
            if (words[0] == ".section") is_in_section = true;
            if (is_in_section) {
                is_in_section = words.back() != "}";
                continue;
            }
            if (words[0][0] == '.') {
                directive(words);
            } else {
                statement(words);
            }
        }
        return std::move(module_);
    }

   private:
    [[noreturn]] void unknown(const std::string& what) const {
        throw std::runtime_error("tests/gpu_sim does not know " + what + " in PTX: " + line_);
    }

    void directive(const std::vector<std::string>& words) {
        const std::string& name = words[0];
        if (name == ".file") {
            files_[words[1]] = words[2].substr(words[2].rfind('/') + 1);
        } else if (name == ".loc") {
            source_ = files_[words[1]] + ':' + words[2];
        } else if (name == ".param") {
            parameter(words);
        } else if (name == ".shared" || name == ".local") {
            memory(words);
        } else if (name == ".visible" || name == ".weak" || name == ".entry") {
            if (std::find(words.begin(), words.end(), ".entry") == words.end()) unknown(name);
            const auto entry = std::find(words.begin(), words.end(), ".entry") + 1;
            kernel_ = &module_[*entry];
            *kernel_ = {};
            kernel_->name = *entry;
            registers_.clear();
            labels_.clear();
            branches_.clear();
            // The parameters are on one line.
            for (auto at = entry; at != words.end(); ++at) {
                if (*at == ".param") parameter({at, words.end()});
            }
        } else if (name == ".global" || name == ".const" || name == ".func" || name == ".extern") {
            unknown(name);
        }
        // .version, .target, .reg, .maxntid, .pragma and similar lines do not matter here.
    }

    // .param .align 8 .b8 name[72], or .param .u64 name
    void parameter(const std::vector<std::string>& words) {
        const auto [name, bytes, alignment] = declared(words);
        const std::int64_t at = (kernel_->parameter_bytes + alignment - 1) / alignment * alignment;
        kernel_->parameters.emplace_back(at, bytes);
        kernel_->parameter_bytes = at + bytes;
        kernel_->symbols[name] = {Space::kParam, at, new_register()};
    }
    void memory(const std::vector<std::string>& words) {
        const auto [name, bytes, alignment] = declared(words);
        const bool is_shared = words[0] == ".shared";
        std::int64_t& end = is_shared ? kernel_->shared_bytes : kernel_->local_bytes;
        const std::int64_t at = (end + alignment - 1) / alignment * alignment;
        end = at + bytes;
        kernel_->symbols[name] = {is_shared ? Space::kShared : Space::kLocal, at, new_register()};
    }
    struct Declared {
        std::string name;
        std::int64_t bytes;
        std::int64_t alignment;
    };
    Declared declared(const std::vector<std::string>& words) const {
        Declared found{"", 0, 1};
        for (std::size_t i = 1; i < words.size(); ++i) {
            if (words[i] == ".align") {
                found.alignment = std::stoll(words[++i]);
            } else if (words[i][0] == '.' && found.bytes == 0) {
                found.bytes = bytes_of(words[i].substr(1));
                found.alignment = std::max(found.alignment, found.bytes);
            } else if (words[i] == "[") {
                found.bytes *= std::stoll(words[++i]);
            } else if (found.name.empty()) {
                found.name = words[i];
            }
        }
        if (found.name.empty() || found.bytes == 0) unknown("this declaration");
        return found;
    }

    void statement(std::vector<std::string> words) {
        if (words[0] == "{" || words[0] == "(" || words[0] == ")") return;
        if (words[0] == "}") return finish();
        if (words.size() == 1 && words[0].back() == ':') {
            labels_[words[0].substr(0, words[0].size() - 1)] = kernel_->code.size();
            return;
        }
        if (kernel_ == nullptr) unknown("this line");
        Instruction instruction;
        instruction.text = line_.substr(line_.find_first_not_of(" \t"));
        instruction.source = source_;
        std::size_t at = 0;
        if (words[0] == "@") {
            instruction.runs_if = words[1] != "!";
            at = instruction.runs_if ? 2 : 3;
            instruction.guard = operand(words[at - 1]);
        }
        const std::string opcode = words[at++];
        words.erase(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(at));
        if (words.empty() || words.back() != ";") unknown("a statement without an end");
        words.pop_back();
        decode(instruction, opcode, words);
        kernel_->code.push_back(std::move(instruction));
    }

    // Operands in order; a list of registers is one operand, a memory address is two words.
    struct Operand {
        std::vector<std::int32_t> registers;
        bool is_address = false;
        std::int64_t offset = 0;
    };
    std::vector<Operand> operands(const std::vector<std::string>& words) {
        std::vector<Operand> found;
        bool is_list = false;
        for (std::size_t i = 0; i < words.size(); ++i) {
            const std::string& word = words[i];
            if (word == "{") {
                found.emplace_back();
                is_list = true;
            } else if (word == "}") {
                is_list = false;
            } else if (word == "[") {
                found.push_back(address(words[++i]));
                ++i;
            } else if (word == "," || word == "|") {
                continue;
            } else if (is_list) {
                found.back().registers.push_back(operand(word));
            } else {
                found.push_back({{operand(word)}});
            }
        }
        return found;
    }
    Operand address(const std::string& word) {
        const std::size_t plus = word.find('+');
        const std::string base = word.substr(0, plus);
        Operand found{{operand(base)}, true};
        if (plus != std::string::npos) found.offset = std::stoll(word.substr(plus + 1));
        return found;
    }

    void decode(Instruction& to, const std::string& opcode, const std::vector<std::string>& words) {
        const std::vector<std::string> parts = split(opcode);
        const std::string& verb = parts[0];
        if (verb == "bra") {
            to.kind = Kind::kBranch;
            branches_.emplace_back(kernel_->code.size(), words.at(0));
            return;
        }
        if (verb == "ret" || verb == "exit") {
            to.kind = Kind::kExit;
            return;
        }
        const std::vector<Operand> given = operands(words);
        if (verb == "ld" || verb == "st" || verb == "atom" || verb == "red") {
            return decode_memory(to, parts, given);
        }
        if (verb == "bar" || verb == "barrier") {
            const bool is_warp = parts.at(1) == "warp";
            if (!is_warp && (words.size() != 1 || words[0] != "0")) unknown("this barrier");
            to.kind = is_warp ? Kind::kWarpBarrier : Kind::kBlockBarrier;
            to.in = given.at(0).registers;
            return;
        }
        if (verb == "shfl" || verb == "vote") return decode_exchange(to, parts, given);
        to.run = find_operation(opcode);
        if (to.run == nullptr || given.empty()) unknown("the instruction " + opcode);
        to.out = given[0].registers;
        for (std::size_t i = 1; i < given.size(); ++i) {
            to.in.insert(to.in.end(), given[i].registers.begin(), given[i].registers.end());
        }
    }

    void decode_memory(Instruction& to, const std::vector<std::string>& parts,
                       const std::vector<Operand>& given) {
        const std::string& verb = parts[0];
        const std::string& type = parts.back();
        to.bytes = static_cast<std::uint8_t>(bytes_of(type));
        to.is_signed = type[0] == 's';
        const auto has = [&parts](const char* word) {
            return std::find(parts.begin(), parts.end(), word) != parts.end();
        };
        if (has("global")) to.space = Space::kGlobal;
        if (has("param")) to.space = Space::kParam;
        if (has("shared")) to.space = Space::kShared;
        if (has("local")) to.space = Space::kLocal;
        if (to.bytes == 0 || has("const")) unknown("this access");
        const auto place = std::find_if(given.begin(), given.end(),
                                        [](const Operand& one) { return one.is_address; });
        if (place == given.end()) unknown("an access without an address");
        to.in = place->registers;
        to.offset = place->offset;
        if (place != given.begin()) to.out = given[0].registers;
        for (auto value = place + 1; value != given.end(); ++value) {
            to.in.insert(to.in.end(), value->registers.begin(), value->registers.end());
        }
        to.kind = verb == "ld" ? Kind::kLoad : verb == "st" ? Kind::kStore : Kind::kAtomic;
        if (to.kind != Kind::kAtomic) return;
        to.action = *(parts.end() - 2);
        static const char* const kActions[] = {"add", "min", "max",  "and",
                                               "or",  "xor", "exch", "cas"};
        if (type[0] == 'f' || std::none_of(std::begin(kActions), std::end(kActions),
                                           [&to](const char* one) { return to.action == one; })) {
            unknown("this atomic");
        }
        if (to.out.empty()) to.out = {new_register()};
    }

    void decode_exchange(Instruction& to, const std::vector<std::string>& parts,
                         const std::vector<Operand>& given) {
        if (parts.at(1) != "sync") unknown("an exchange without .sync");
        to.kind = parts[0] == "shfl" ? Kind::kShuffle : Kind::kVote;
        to.mode = parts[2][0];
        if (parts[2] == "any") to.mode = 'o';
        if (parts[2] == "ballot") to.mode = 'b';
        if (to.mode == 'b' && parts[2] != "bfly" && parts[2] != "ballot") unknown("this exchange");
        // shfl d|p, a, b, c, mask; vote d, a, mask. The mask comes first here.
        const std::size_t inputs = to.kind == Kind::kShuffle ? 4 : 2;
        if (given.size() < inputs + 1) unknown("this exchange");
        for (std::size_t i = 0; i < given.size() - inputs; ++i) {
            to.out.push_back(given[i].registers.at(0));
        }
        to.in.push_back(given.back().registers.at(0));
        for (std::size_t i = given.size() - inputs; i + 1 < given.size(); ++i) {
            to.in.push_back(given[i].registers.at(0));
        }
    }

    std::int32_t new_register() { return kernel_->num_registers++; }

    std::int32_t operand(const std::string& word) {
        if (const auto symbol = kernel_->symbols.find(word); symbol != kernel_->symbols.end()) {
            return symbol->second.reg;
        }
        static const std::map<std::string, std::int32_t> kSpecial = {
            {"%tid.x", kTidX},       {"%tid.y", kTidY},       {"%tid.z", kTidZ},
            {"%ntid.x", kNtidX},     {"%ntid.y", kNtidY},     {"%ntid.z", kNtidZ},
            {"%ctaid.x", kCtaidX},   {"%ctaid.y", kCtaidY},   {"%ctaid.z", kCtaidZ},
            {"%nctaid.x", kNctaidX}, {"%nctaid.y", kNctaidY}, {"%nctaid.z", kNctaidZ},
            {"%laneid", kLaneid},
        };
        if (const auto special = kSpecial.find(word); special != kSpecial.end()) {
            return special->second;
        }
        if (word == "_") return new_register();
        const auto [known, is_new] = registers_.try_emplace(word, 0);
        if (!is_new) return known->second;
        known->second = new_register();
        if (word[0] == '%') {
            // Hardware registers for which the compiler uses registers with numbers.
            for (const char* of : {"%smid", "%nsmid", "%warpid", "%nwarpid", "%lanemask", "%clock",
                                   "%gridid", "%globaltimer", "%envreg", "%pm"}) {
                if (begins(word, of)) unknown("the register " + word);
            }
            if (word.find('.') != std::string::npos) unknown("the register " + word);
            return known->second;
        }
        if (std::isdigit(static_cast<unsigned char>(word[0])) == 0 && word[0] != '-') {
            unknown("the name " + word);
        }
        kernel_->constants.emplace_back(known->second, number(word));
        return known->second;
    }
    [[nodiscard]] static std::uint64_t number(const std::string& word) {
        if (begins(word, "0f") || begins(word, "0F") || begins(word, "0d") || begins(word, "0D")) {
            return std::stoull(word.substr(2), nullptr, 16);
        }
        if (word[0] == '-') return static_cast<std::uint64_t>(std::stoll(word, nullptr, 0));
        return std::stoull(word, nullptr, 0);
    }

    void finish() {
        for (const auto& [at, label] : branches_) {
            const auto found = labels_.find(label);
            if (found == labels_.end()) unknown("the label " + label);
            kernel_->code[at].target = static_cast<std::int32_t>(found->second);
        }
        kernel_->code.push_back({});  // the end of the code returns
        kernel_->code.back().kind = Kind::kExit;
        kernel_ = nullptr;
    }

    Module module_;
    Kernel* kernel_ = nullptr;
    std::string line_;
    std::string source_;
    std::map<std::string, std::string> files_;
    std::unordered_map<std::string, std::int32_t> registers_;
    std::map<std::string, std::size_t> labels_;
    std::vector<std::pair<std::size_t, std::string>> branches_;
};

}  // namespace

Module parse(std::string_view text) { return Parser().run(text); }

Operation find_operation(const std::string& opcode) {
    static const Operations& all = [] {
        auto* table = new Operations;
        add_integers(*table);
        add_floats(*table);
        add_conversions(*table);
        return std::ref(*table);
    }();
    const auto found = all.find(opcode);
    return found == all.end() ? nullptr : found->second;
}

}  // namespace gpu_sim
