// Registration of the operators that draw random numbers.
#pragma once

namespace fretsaw {
class KernelRegistry;

void register_random(KernelRegistry& registry);  // Random*, Multinomial, Bernoulli, Dropout

}  // namespace fretsaw
