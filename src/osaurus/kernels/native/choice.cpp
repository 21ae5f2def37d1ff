// Tokens of rows of logits: the largest, what the filters leave, the keyed draw.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>

#include "choice.h"
#include "run.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace osaurus;

API const char* osaurus_kernels();

namespace {

const ChoiceKernels& kernels() {
#if defined(__x86_64__)
  for (const ChoiceKernels* set : {&choice_avx512bf16, &choice_avx512, &choice_avx2})
    if (!std::strcmp(set->name, osaurus_kernels())) return *set;
#endif
  return choice_portable;
}

// Fewer entries than these are looked through before a second thread has woken.
constexpr int64_t ENTRIES_OF_A_TEAM = 1 << 17;

template <class Work> void each_piece(int64_t count, int threads, const Work& work) {
  each(count, 1, count * CHOICE_PIECE < ENTRIES_OF_A_TEAM ? 1 : threads, work);
}

int64_t pieces_of(int64_t vocab) { return (vocab + CHOICE_PIECE - 1) / CHOICE_PIECE; }

struct Piece {
  int64_t ask, first, size;
  float best;
  Depths depths;
  float total, above;
  std::vector<Candidate> found;
  std::vector<Contender> contenders;
};

double noise_of(uint64_t key, int64_t id) {
  double uniform = ((double)(mixed((uint64_t)id * WEYL + key) >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log(uniform));
}

// The largest sums of score and noise yet: all that another logarithm might put first.
struct Best {
  double score = -INFINITY;
  std::vector<Contender> all;
  void offer(Contender one) {
    if (one.score < score - CHOICE_MARGIN) return;
    if (one.score > score) {
      score = one.score;
      all.erase(std::remove_if(all.begin(), all.end(),
                               [&](const Contender& c) { return c.score < score - CHOICE_MARGIN; }),
                all.end());
    }
    all.push_back(one);
  }
};

bool precedes(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score > b.score : a.id < b.id;
}

// One row's way through the filters.
class Choice {
 public:
  Choice(Ask* ask, Piece* pieces) : ask_(ask), pieces_(pieces), count_(pieces_of(ask->vocab)) {}

  void see_best() {
    best_ = -INFINITY;
    for (int64_t i = 0; i < count_; ++i)
      if (pieces_[i].best > best_) best_ = pieces_[i].best, best_piece_ = i;
    scale_ = 1 / ask_->temperature;
    best_score_ = best_ / ask_->temperature;
    top_k_ = ask_->top_k > 0 && ask_->top_k < ask_->vocab ? ask_->top_k : 0;
    fails_ = !(best_ > -INFINITY && best_ < INFINITY);
    ask_->count = -1;
  }
  bool fails() const { return fails_; }
  bool nucleus() const { return ask_->top_p > 0; }
  // A draw without top-k looks for the best of all first: the nucleus mostly holds it.
  bool contends() const { return !fails_ && ask_->draws && !top_k_; }
  bool measures() const { return !fails_ && !done_; }
  bool weighs() const { return !top_k_ || !ask_->draws; }
  float best() const { return best_; }
  float scale() const { return scale_; }
  float depth() const { return depth_; }

  // How deep the candidates lie, from the pieces' counts and weights.
  void choose_depth() {
    double total = 0, weight[DEPTHS] = {};
    int64_t count[DEPTHS] = {};
    for (int64_t i = 0; i < count_; ++i) {
      total += pieces_[i].depths.total;
      for (int d = 0; d < DEPTHS; ++d) {
        weight[d] += pieces_[i].depths.weight[d];
        count[d] += pieces_[i].depths.count[d];
      }
    }
    total_ = total;
    ask_->log_total = best_score_ + std::log(total);
    depth_ = INFINITY;
    for (int d = DEPTHS - 1; d >= 0; --d) {
      bool enough = top_k_ ? count[d] >= top_k_ : nucleus() && weight[d] >= ask_->top_p * total * 1.0001;
      if (enough) depth_ = DEPTH[d];
    }
    // Top-p counts the weight of all that top-k leaves, min-p's among them or not.
    if (-ask_->min_p < depth_ && !(top_k_ && nucleus())) depth_ = -ask_->min_p;
    // What is rounded otherwise than the scores: none shall be missed for it.
    depth_ = depth_ * 1.0001f + 1e-4f + std::fabs(best_score_) * 1e-6f;
    if (!(depth_ < 1e30f)) depth_ = 3e38f;  // all but -inf
  }

  void filter() {
    std::vector<Candidate> found;
    for (int64_t i = 0; i < count_; ++i) found.insert(found.end(), pieces_[i].found.begin(), pieces_[i].found.end());
    for (Candidate& one : found) one.score /= ask_->temperature;
    size_t kept = found.size();
    if (top_k_) {
      kept = std::min<size_t>(kept, top_k_);
      sort_to(found, 0, kept);
    }
    if (nucleus()) kept = cut_nucleus(found, kept);
    if (!top_k_ && !nucleus() && !ask_->draws) sort_to(found, 0, kept);
    found.resize(kept);
    if (ask_->min_p > -INFINITY) {
      float least = best_score_ + ask_->min_p;
      found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& c) { return !(c.score >= least); }),
                  found.end());
    }
    if (ask_->draws)
      draw(found);
    else
      give(found);
  }

  // What the piece's entries may contend with: the best score and its noise.
  double first_offer() {
    if (offer_ == -INFINITY) {
      const Piece& p = pieces_[best_piece_];
      int64_t id = p.first + kernels().find(ask_->row + p.first, p.size, best_);
      offer_ = noise_of(ask_->key, id);
    }
    return offer_;
  }
  void contend(Piece& p) {
    double least = offer_;  // sums are less the best score here: it may be large
    Best best;
    const float* x = ask_->row + p.first;
    int32_t places[16];
    int found;
    for (int64_t at = 0; at < p.size;) {
      at = kernels().contend(x, at, p.size, p.first, ask_->key, best_, scale_, (float)least, places, &found);
      for (int i = 0; i < found; ++i) {
        double score = (double)(x[places[i]] / ask_->temperature) + noise_of(ask_->key, p.first + places[i]);
        best.offer(Contender{score, (int32_t)(p.first + places[i])});
        least = std::max(least, score - (double)best_score_ - CHOICE_MARGIN);
      }
    }
    p.contenders = std::move(best.all);
  }
  void join_contenders() {
    for (int64_t i = 0; i < count_; ++i)
      for (const Contender& one : pieces_[i].contenders) all_.offer(one);
    done_ = !nucleus() && above_min_p(all_);
  }
  bool ranks() const { return contends() && nucleus() && above_min_p(all_); }
  void rank(Piece& p) const {
    // What division by the temperature may make equal counts as before it.
    float value = ask_->row[all_.all[0].id], least = value - std::fabs(value) * 1e-6f;
    kernels().weigh(ask_->row + p.first, p.size, best_, scale_, least, &p.total, &p.above);
  }
  // The nucleus surely holds the winner where what comes before it is light enough.
  void join_ranks() {
    double total = 0, before = -std::exp((ask_->row[all_.all[0].id] - best_) * (double)scale_);
    for (int64_t i = 0; i < count_; ++i) {
      total += pieces_[i].total;
      before += pieces_[i].above;
    }
    done_ = before < ask_->top_p * total * 0.9999;
  }
  bool done() const { return done_; }
  void give_best() { give(all_); }

 private:
  bool above_min_p(const Best& best) const {
    if (best.all.size() != 1) return !nucleus() && ask_->min_p == -INFINITY;
    return ask_->row[best.all[0].id] / ask_->temperature >= best_score_ + ask_->min_p;
  }

  static void sort_to(std::vector<Candidate>& found, size_t from, size_t to) {
    if (to < found.size()) std::nth_element(found.begin() + from, found.begin() + to, found.end(), precedes);
    std::sort(found.begin() + from, found.begin() + to, precedes);
  }

  // How many of the first `limit` candidates the nucleus holds; it and they are sorted then.
  size_t cut_nucleus(std::vector<Candidate>& found, size_t limit) {
    double log_total = ask_->log_total;
    if (top_k_) {
      double total = 0;
      for (size_t i = 0; i < limit; ++i) total += std::exp((double)found[i].score - best_score_);
      log_total = best_score_ + std::log(total);
    }
    double before = 0;
    size_t sorted = top_k_ ? limit : 0;
    for (size_t i = 0; i < limit; ++i) {
      if (i == sorted) {
        sorted = std::min(limit, std::max<size_t>(256, sorted * 4));
        sort_to(found, i, sorted);
      }
      if (i && !(before < ask_->top_p)) return i;
      before += std::exp((double)found[i].score - log_total);
    }
    return limit;
  }

  void draw(const std::vector<Candidate>& found) {
    Best best;
    for (const Candidate& one : found) {
      uint64_t hashed = mixed((uint64_t)one.id * WEYL + ask_->key);
      double rest = (double)(~hashed >> 11) * 0x1p-53;
      // As in choice_contend.
      if (best.score > -INFINITY && rest > std::exp(one.score - best.score) * 1.001) continue;
      best.offer(Contender{(double)one.score + noise_of(ask_->key, one.id), one.id});
    }
    give(best);
  }

  void give(const Best& best) {
    if (best.all.empty() || (int64_t)best.all.size() > ask_->capacity) return;
    ask_->count = (int32_t)best.all.size();
    for (int32_t i = 0; i < ask_->count; ++i) ask_->ids[i] = best.all[i].id;
  }
  void give(const std::vector<Candidate>& found) {
    if ((int64_t)found.size() > ask_->capacity) return;
    ask_->count = (int32_t)found.size();
    for (int32_t i = 0; i < ask_->count; ++i) {
      ask_->ids[i] = found[i].id;
      ask_->scores[i] = found[i].score;
    }
  }

  Ask* ask_;
  Piece* pieces_;
  int64_t count_, best_piece_ = 0;
  float best_ = 0, best_score_ = 0, scale_ = 1, depth_ = 0;
  double total_ = 0, offer_ = -INFINITY;
  int32_t top_k_ = 0;
  bool fails_ = false, done_ = false;
  Best all_;
};

void choose(Ask* asks, int64_t count, int threads) {
  std::vector<Piece> pieces;
  std::vector<int64_t> first;
  for (int64_t i = 0; i < count; ++i) {
    first.push_back((int64_t)pieces.size());
    for (int64_t at = 0; at < asks[i].vocab; at += CHOICE_PIECE)
      pieces.push_back(Piece{i, at, std::min(CHOICE_PIECE, asks[i].vocab - at), 0, {}, 0, 0, {}, {}});
  }
  const ChoiceKernels& k = kernels();
  int64_t total = (int64_t)pieces.size();
  each_piece(total, threads, [&](int64_t i) {
    Piece& p = pieces[i];
    k.best(asks[p.ask].row + p.first, p.size, &p.best);
  });
  std::vector<Choice> choices;
  for (int64_t i = 0; i < count; ++i) {
    choices.emplace_back(&asks[i], pieces.data() + first[i]);
    choices.back().see_best();
    if (choices.back().contends()) choices.back().first_offer();
  }
  auto on_pieces = [&](auto takes, auto work) {
    if (std::none_of(choices.begin(), choices.end(), takes)) return;
    each_piece(total, threads, [&](int64_t i) {
      if (takes(choices[pieces[i].ask])) work(choices[pieces[i].ask], pieces[i]);
    });
  };
  auto contends = [](const Choice& c) { return c.contends(); };
  auto ranks = [](const Choice& c) { return c.ranks(); };
  auto measures = [](const Choice& c) { return c.measures(); };
  on_pieces(contends, [&](Choice& c, Piece& p) { c.contend(p); });
  for (Choice& c : choices)
    if (c.contends()) c.join_contenders();
  on_pieces(ranks, [&](Choice& c, Piece& p) { c.rank(p); });
  for (Choice& c : choices) {
    if (c.ranks()) c.join_ranks();
    if (c.done()) c.give_best();
  }
  on_pieces(measures, [&](Choice& c, Piece& p) {
    k.measure(asks[p.ask].row + p.first, p.size, c.best(), c.scale(), c.weighs(), &p.depths);
  });
  for (Choice& c : choices)
    if (c.measures()) c.choose_depth();
  on_pieces(measures, [&](Choice& c, Piece& p) {
    std::unique_ptr<Candidate[]> room(new Candidate[CHOICE_PIECE + 1]);
    int64_t found = k.collect(asks[p.ask].row + p.first, p.size, c.best(), c.scale(), c.depth(), room.get());
    p.found.assign(room.get(), room.get() + found);
    for (Candidate& one : p.found) one.id += (int32_t)p.first;
  });
  if (std::any_of(choices.begin(), choices.end(), measures))
    each_piece(count, threads, [&](int64_t i) {
      if (choices[i].measures()) choices[i].filter();
    });
}

void find_largest(const float* logits, int64_t rows, int64_t vocab, int64_t* places, uint8_t* finite, int threads) {
  const ChoiceKernels& k = kernels();
  int64_t pieces = pieces_of(vocab);
  std::vector<float> best(rows * pieces);
  std::vector<uint8_t> whole(rows * pieces);
  each_piece(rows * pieces, threads, [&](int64_t i) {
    int64_t first = i % pieces * CHOICE_PIECE;
    whole[i] = k.best(logits + i / pieces * vocab + first, std::min(CHOICE_PIECE, vocab - first), &best[i]);
  });
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = best.data() + r * pieces;
    int64_t piece = std::max_element(from, from + pieces) - from, first = piece * CHOICE_PIECE;
    int64_t place = k.find(logits + r * vocab + first, std::min(CHOICE_PIECE, vocab - first), from[piece]);
    places[r] = place < 0 ? -1 : first + place;
    finite[r] = std::all_of(whole.begin() + r * pieces, whole.begin() + (r + 1) * pieces, [](uint8_t x) { return x; });
  }
}

}  // namespace

// Of each row of logits [rows, vocab] the place of the largest, the lowest among equals, and
// whether all of it is finite. -1 where there is no number. Returns 1 when there is no memory.
API int osaurus_largest(const float* logits, int64_t rows, int64_t vocab, int64_t* places, uint8_t* finite,
                        int threads) {
  try {
    find_largest(logits, rows, vocab, places, finite, threads);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// 0, or 1 when there is no memory.
API int osaurus_choose(Ask* asks, int64_t count, int threads) {
  try {
    choose(asks, count, threads);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
