// Memory that runs of one program share, one run at a time.
#pragma once
#include "run.h"

namespace osaurus {

class Arena {
 public:
  void* get(size_t bytes);  // grows only; contents are lost when it does
  void drop();

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

class Stage {
 public:
  ~Stage();
  // The first `count` operations of a program over the rows of `args`.
  void run(const Program& program, const Kernels& kernels, const Args& args, int count, int threads);

 private:
  Arena rows_, parts_, scratch_;
};

}  // namespace osaurus
