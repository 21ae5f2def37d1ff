// Operations outside of programs, compiled once for each instruction set (OSAURUS_KERNELS names it).
#include "coded.h"
#include "sampling.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define JOINED_OF(a, b) a##b
#define JOINED(a, b) JOINED_OF(a, b)

namespace osaurus {
extern const ChoiceKernels JOINED(choice_, OSAURUS_KERNELS);
const ChoiceKernels JOINED(choice_, OSAURUS_KERNELS) = {TEXT(OSAURUS_KERNELS), choice_best,  choice_find,
                                                        choice_measure,        choice_weigh, choice_collect,
                                                        choice_contend};
extern const CodedKernels JOINED(coded_, OSAURUS_KERNELS);
const CodedKernels JOINED(coded_, OSAURUS_KERNELS) = {TEXT(OSAURUS_KERNELS), coded_scores, coded_sums};
}  // namespace osaurus
