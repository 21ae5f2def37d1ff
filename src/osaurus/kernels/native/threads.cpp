// The team that a run's threads come from. On Linux it is the OpenMP team that torch's kernels
// run on, joined through libgomp's GOMP_parallel: a second team beside it would make both sleep.
// Where there is none, a small pool of our own.
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "run.h"

namespace osaurus {
namespace {

typedef void (*GompParallel)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;

struct Job {
  void (*work)(void*, int);
  void* data;
  std::atomic<int> next{0};
};

void run_job(void* data) {
  Job* job = (Job*)data;
  job->work(job->data, job->next.fetch_add(1));
}

// One pool for the process; a run holds it from start to end.
class Pool {
 public:
  void run(int threads, Job* job) {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while ((int)workers_.size() < threads - 1) {
        int index = (int)workers_.size();
        workers_.emplace_back([this, index] { serve(index); });
        workers_.back().detach();
      }
      job_ = job;
      wanted_ = threads - 1;
      running_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    run_job(job);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void serve(int index) {
    uint64_t seen = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen && index < wanted_; });
        seen = generation_;
        job = job_;
      }
      run_job(job);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

Pool& pool() {
  static Pool* only = new Pool;  // its threads outlive every static
  return *only;
}

}  // namespace

void parallel(int threads, void (*work)(void*, int), void* data) {
  Job job;
  job.work = work;
  job.data = data;
  if (threads <= 1)
    run_job(&job);
  else if (gomp_parallel)
    gomp_parallel(run_job, &job, (unsigned)threads, 0);
  else
    pool().run(threads, &job);
}

}  // namespace osaurus

extern "C" __attribute__((visibility("default"))) void osaurus_join_team(void* gomp) {
  osaurus::gomp_parallel = (osaurus::GompParallel)gomp;
}
