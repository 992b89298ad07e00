// A CUDA device made of host memory and threads, for a CPU build of PyTorch. See __init__.py.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/library.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <linux/falloc.h>
#include <fcntl.h>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>

namespace at::native {
Tensor as_strided_tensorimpl(const Tensor&, IntArrayRef, IntArrayRef, std::optional<int64_t>);
Tensor view(const Tensor&, IntArrayRef);
Tensor unfold(const Tensor&, int64_t, int64_t, int64_t);
}  // namespace at::native

namespace {
using namespace at;
using Job = std::function<void()>;
using c10::DeviceIndex;
constexpr auto kCuda = DeviceType::CUDA;

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}
const int64_t delay_us = setting("SIMULATED_CUDA_DELAY_US", 0);
const bool poison = setting("SIMULATED_CUDA_POISON", 1), in_order = setting("SIMULATED_CUDA_SYNC", 0);
std::vector<int64_t> memory_sizes() {  // SIMULATED_CUDA_MEMORY: bytes of each device, by commas
  std::vector<int64_t> sizes;
  const char* text = std::getenv("SIMULATED_CUDA_MEMORY");
  std::stringstream in(text ? text : "");  // set by environment()
  for (std::string one; std::getline(in, one, ',');) sizes.push_back(std::stoll(one));
  return sizes;
}
const std::vector<int64_t> sizes = memory_sizes();
std::atomic<bool> is_begun{false};
bool forked = false;

// ---- streams and events
// ----------------------------------------------------------------------------------------------
struct Queue {
  std::mutex m;
  std::condition_variable changed;
  std::deque<std::pair<Job, bool>> jobs;
  bool busy = false, started = false;
  std::exception_ptr error;
  std::mt19937 dice{static_cast<unsigned>(setting("SIMULATED_CUDA_SEED", 0))};

  void put(Job job, bool is_copy = false) {
    TORCH_CHECK(!forked, "CUDA error: initialization error");
    is_begun = true;
    std::unique_lock lock(m);
    if (!started) {
      started = true;
      std::thread([this] { work(); }).detach();
    }
    jobs.emplace_back(std::move(job), is_copy);
    changed.notify_all();
  }
  void work() {
    for (;;) {
      std::unique_lock lock(m);
      changed.wait(lock, [&] { return !jobs.empty(); });
      auto [job, is_copy] = std::move(jobs.front());
      jobs.pop_front();
      busy = true;
      auto us = delay_us && (is_copy || dice() % 16 == 0) ? dice() % delay_us : 0;
      lock.unlock();
      if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      try {
        job();
      } catch (...) {
        lock.lock();
        if (!error) error = std::current_exception();
        lock.unlock();
      }
      job = nullptr;
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
  bool idle() {
    std::unique_lock lock(m);
    return jobs.empty() && !busy;
  }
  void drain() {
    if (forked) return;
    std::unique_lock lock(m);
    changed.wait(lock, [&] { return jobs.empty() && !busy; });
    if (error) {
      auto raised = std::exchange(error, nullptr);
      std::rethrow_exception(raised);
    }
  }
};
struct Mark {  // a version of an event
  std::mutex m;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point when;
  void set() {
    std::unique_lock lock(m);
    done = true;
    when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(m);
    changed.wait(lock, [&] { return done; });
  }
  bool is_done() {
    std::unique_lock lock(m);
    return done;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

constexpr int kStreams = 33;  // the default one, and a pool that is given out in turn
std::vector<std::vector<std::unique_ptr<Queue>>>& queues() {
  static auto* all = [] {
    auto* made = new std::vector<std::vector<std::unique_ptr<Queue>>>(sizes.size());
    for (auto& device : *made)
      for (int i = 0; i < kStreams; i++) device.push_back(std::make_unique<Queue>());
    return made;
  }();
  return *all;
}
thread_local DeviceIndex device_here = 0;
thread_local std::map<DeviceIndex, int64_t> current_streams;
Queue& queue_of(DeviceIndex device, int64_t stream) { return *queues().at(device).at(stream); }
Queue& queue_of(Stream s) { return queue_of(s.device_index(), s.id()); }
int64_t stream_on(DeviceIndex device) { return current_streams[device]; }
Queue& current(DeviceIndex device) { return queue_of(device, stream_on(device)); }
MarkPtr mark(Queue& queue) {
  auto m = std::make_shared<Mark>();
  queue.put([m] { m->set(); });
  return m;
}
DeviceIndex index_of(Device d) { return d.index() < 0 ? device_here : d.index(); }

#define TRACE(what, ...) \
  if (auto* t = c10::impl::GPUTrace::get_trace()) (*t)->trace_gpu_##what(kCuda, __VA_ARGS__)
uintptr_t name_of(DeviceIndex d, int64_t stream) { return stream; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCuda; }
  Device exchangeDevice(Device d) const override {
    auto was = getDevice();
    setDevice(d);
    return was;
  }
  Device getDevice() const override { return {kCuda, device_here}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < (int)sizes.size(), "CUDA error: invalid device ordinal");
    if (d.index() >= 0) device_here = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) device_here = d.index();
  }
  Stream make(DeviceIndex d, int64_t id) const { return Stream(Stream::UNSAFE, Device(kCuda, d), id); }
  Stream getStream(Device d) const override { return make(index_of(d), stream_on(index_of(d))); }
  Stream getDefaultStream(Device d) const override { return make(index_of(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<int> next{0};
    int64_t id = 1 + next++ % (kStreams - 1);
    TRACE(stream_creation, name_of(index_of(d), id));
    return make(index_of(d), id);
  }
  Stream exchangeStream(Stream s) const override {
    auto was = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return was;
  }
  void* getStreamNativeHandle(const Stream s) const override { return &queue_of(s); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override {
    if (!e) return;
    TRACE(event_deletion, (uintptr_t)e);
    delete static_cast<MarkPtr*>(e);
  }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*e) {
      *e = new MarkPtr();
      TRACE(event_creation, (uintptr_t)*e);
    }
    TRACE(event_record, (uintptr_t)*e, name_of(s.device_index(), s.id()));
    *static_cast<MarkPtr*>(*e) = mark(queue_of(s));
  }
  void block(void* e, const Stream& s) const override {
    if (!e) return;
    TRACE(event_wait, (uintptr_t)e, name_of(s.device_index(), s.id()));
    queue_of(s).put([m = *static_cast<MarkPtr*>(e)] { m->wait(); });
  }
  bool queryEvent(void* e) const override { return !e || (*static_cast<MarkPtr*>(e))->is_done(); }
  DeviceIndex deviceCount() const noexcept override { return sizes.size(); }
  bool queryStream(const Stream& s) const override { return queue_of(s).idle(); }
  void synchronizeStream(const Stream& s) const override {
    TRACE(stream_synchronization, name_of(s.device_index(), s.id()));
    queue_of(s).drain();
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    TRACE(event_synchronization, (uintptr_t)e);
    (*static_cast<MarkPtr*>(e))->wait();
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    {
      auto* t = c10::impl::GPUTrace::get_trace();
      if (t) (*t)->trace_gpu_device_synchronization(kCuda);
    }
    for (auto& queue : queues()[d < 0 ? device_here : d]) queue->drain();
  }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override {
    c10::getDeviceAllocator(kCuda)->recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto &first = *static_cast<MarkPtr*>(a), &second = *static_cast<MarkPtr*>(b);
    first->wait(), second->wait();
    return std::chrono::duration<double, std::milli>(second->when - first->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- device memory: the caching allocator's sizes, splits and statistics
// ---------------------------------------------
struct Block {
  DeviceIndex device;
  int64_t stream;
  bool small;
  char* at;
  int64_t size, asked = 0;
  bool used = false;
  Block *before = nullptr, *after = nullptr;
  std::set<int64_t> used_on;
  std::vector<MarkPtr> pending;
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const { return std::tie(a->size, a->at) < std::tie(b->size, b->at); }
};
struct Arena {  // one mapping that nobody may touch, whose addresses tensors have, and one that kernels use
  char *device = nullptr, *host = nullptr;
  int file = -1;
  int64_t size = 0, taken = 0;
  std::map<char*, int64_t> segments;
};
void release(void*);
struct Memory final : c10::DeviceAllocator {
  std::recursive_mutex m;
  std::vector<Arena> arenas{sizes.size()};
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats{sizes.size()};
  std::map<std::tuple<DeviceIndex, int64_t, bool>, std::set<Block*, BySize>> pools;
  std::deque<Block*> waiting;
  std::set<Block*> live;
  int64_t observed_oom = 0;

  Arena& arena(DeviceIndex d) {
    auto& a = arenas.at(d);
    if (!a.device) {
      a.size = sizes[d], a.file = memfd_create("simulated_cuda", 0);
      TORCH_CHECK(ftruncate(a.file, 4 * a.size) == 0, "no room for the device's memory");  // addresses are not scarce
      auto map = [&](int rights) {
        return static_cast<char*>(mmap(nullptr, 4 * a.size, rights, MAP_SHARED | MAP_NORESERVE, a.file, 0));
      };
      a.device = map(PROT_NONE), a.host = map(PROT_READ | PROT_WRITE);
      TORCH_CHECK(a.device != MAP_FAILED && a.host != MAP_FAILED, "no addresses for the device's memory");
    }
    return a;
  }
  char* host(const void* p) {  // where kernels find it
    for (auto& a : arenas)
      if (a.device && p >= a.device && p < a.device + 4 * a.size)
        return a.host + (static_cast<const char*>(p) - a.device);
    TORCH_CHECK(!p, "an address that is not the device's");
    return nullptr;
  }
  Device device_of(const void* p) {
    for (size_t d = 0; d < arenas.size(); d++)
      if (arenas[d].device && p >= arenas[d].device && p < arenas[d].device + 4 * arenas[d].size)
        return {kCuda, (DeviceIndex)d};
    TORCH_CHECK(false, "an address that is not the device's");
  }
  void count(c10::CachingAllocator::StatArray& s, bool small, int64_t by) {
    for (size_t i : {size_t(0), size_t(small ? 1 : 2)}) by >= 0 ? s[i].increase(by) : s[i].decrease(-by);
  }
  char* segment(DeviceIndex d, int64_t size) {  // cudaMalloc; null without room
    auto& a = arena(d);
    if (a.taken + size > a.size) return nullptr;
    char* at = a.device;
    for (auto& [begin, length] : a.segments) {
      if (begin - at >= size) break;
      at = begin + length;
    }
    if (at + size > a.device + 4 * a.size) return nullptr;
    a.segments[at] = size, a.taken += size;
    if (poison) std::memset(host(at), 0xFF, size);
    return at;
  }
  void finish() {  // blocks that other streams used
    for (size_t n = waiting.size(); n--;) {
      Block* b = waiting.front();
      waiting.pop_front();
      bool done = std::all_of(b->pending.begin(), b->pending.end(), [](auto& e) { return e->is_done(); });
      if (done) {
        b->pending.clear();
        back(b);
      } else
        waiting.push_back(b);
    }
  }
  void back(Block* b) {
    auto& s = stats[b->device];
    count(s.active_bytes, b->small, -b->size), count(s.active, b->small, -1);
    auto& pool = pools[{b->device, b->stream, b->small}];
    auto join = [&](Block* a, Block* c) {  // c becomes part of a
      a->size += c->size, a->after = c->after;
      if (c->after) c->after->before = a;
      delete c;
    };
    if (b->after && !b->after->used) {
      pool.erase(b->after);
      join(b, b->after);
    }
    if (b->before && !b->before->used) {
      auto* a = b->before;
      pool.erase(a);
      join(a, b);
      b = a;
    }
    pool.insert(b);
  }
  Block* take(DeviceIndex d, int64_t n) {
    finish();
    int64_t size = n <= 512 ? 512 : (n + 511) / 512 * 512;
    bool small = size <= (1 << 20);
    auto stream = stream_on(d);
    auto& pool = pools[{d, stream, small}];
    auto& s = stats[d];
    Block key{d, stream, small, nullptr, size};
    auto found = pool.lower_bound(&key);
    Block* b = found == pool.end() ? nullptr : *found;
    if (b) pool.erase(found);
    if (!b) {
      int64_t length = small ? 2 << 20 : size < (10 << 20) ? 20 << 20 : (size + (2 << 20) - 1) / (2 << 20) * (2 << 20);
      char* at = segment(d, length);
      if (!at) {
        s.num_alloc_retries++;
        drain_all(d);
        finish();
        empty(d);
        at = segment(d, length);
      }
      if (!at) {
        s.num_ooms++;
        observed_oom++;
        fail(d, n);
      }
      count(s.segment, small, 1), count(s.reserved_bytes, small, length);
      b = new Block{d, stream, small, at, length};
    }
    int64_t left = b->size - size;
    if (small ? left >= 512 : left > (1 << 20)) {
      auto* rest = new Block{d, stream, small, b->at + size, left};
      rest->before = b, rest->after = b->after;
      if (rest->after) rest->after->before = rest;
      b->after = rest, b->size = size;
      pool.insert(rest);
    }
    b->used = true, b->asked = n;
    count(s.allocated_bytes, small, b->size), count(s.active_bytes, small, b->size), count(s.requested_bytes, small, n);
    count(s.allocation, small, 1), count(s.active, small, 1);
    live.insert(b);
    return b;
  }
  void drain_all(DeviceIndex d) {
    for (auto& queue : queues()[d]) queue->drain();
  }
  void fail(DeviceIndex d, int64_t n) {
    auto gib = [](int64_t bytes) {
      char text[32];
      snprintf(text, 32, bytes >> 30 ? "%.2f GiB" : "%.2f MiB", bytes / (bytes >> 30 ? 1073741824. : 1048576.));
      return std::string(text);
    };
    auto& s = stats[d];
    auto used = s.allocated_bytes[0].current, kept = s.reserved_bytes[0].current;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", gib(n), ". GPU ", int(d),
                     " has a total capacity of ", gib(sizes[d]), " of which ", gib(sizes[d] - kept),
                     " is free. Including non-PyTorch memory, this process has ", gib(kept),
                     " memory in use. Of the allocated memory ", gib(used), " is allocated by PyTorch, and ",
                     gib(kept - used),
                     " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
                     "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.");
  }
  void free(Block* b) {
    std::lock_guard lock(m);
    TRACE(memory_deallocation, (uintptr_t)b->at);
    auto& s = stats[b->device];
    live.erase(b);
    b->used = false;
    count(s.allocated_bytes, b->small, -b->size), count(s.requested_bytes, b->small, -b->asked),
        count(s.allocation, b->small, -1);
    if (poison && !forked)
      queue_of(b->device, b->stream).put([at = host(b->at), size = b->size] { std::memset(at, 0xFF, size); });
    if (b->used_on.empty() || forked) return back(b);
    b->used = true;  // not to be joined
    for (auto stream : b->used_on) b->pending.push_back(mark(queue_of(b->device, stream)));
    if (poison) b->pending.push_back(mark(queue_of(b->device, b->stream)));
    b->used_on.clear();
    waiting.push_back(b);
  }
  void empty(DeviceIndex d) {
    for (auto& [key, pool] : pools) {
      if (std::get<0>(key) != d) continue;
      for (auto it = pool.begin(); it != pool.end();) {
        Block* b = *it;
        if (b->before || b->after) {
          ++it;
          continue;
        }
        auto& a = arena(d);
        queue_of(d, b->stream).drain();  // its poison
        fallocate(a.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, b->at - a.device, b->size);
        a.segments.erase(b->at), a.taken -= b->size;
        count(stats[d].segment, b->small, -1), count(stats[d].reserved_bytes, b->small, -b->size);
        it = pool.erase(it);
        delete b;
      }
    }
  }
  DataPtr allocate(size_t n) override {
    TORCH_CHECK(!forked, "CUDA error: initialization error");
    is_begun = true;
    if (!n) return {nullptr, nullptr, &release, {kCuda, device_here}};
    std::lock_guard lock(m);
    Block* b = take(device_here, n);
    TRACE(memory_allocation, (uintptr_t)b->at);
    return {b->at, b, &release, {kCuda, device_here}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    auto* self = const_cast<Memory*>(this);
    current(device_here).put([to = self->host(to), from = self->host(from), n] { std::memcpy(to, from, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(m);
    for (size_t d = 0; d < sizes.size(); d++) {
      drain_all(d);
      finish();
      empty(d);
    }
  }
  void recordStream(const DataPtr& p, Stream s) override {
    std::lock_guard lock(m);
    auto* b = static_cast<Block*>(p.get_context());
    if (b && b->stream != s.id()) b->used_on.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard lock(m);
    finish();
    return stats.at(d);
  }
  template <class F>
  void each(DeviceIndex d, F f) {
    auto& s = stats.at(d);
    for (auto* array : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                        &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& stat : *array) f(stat);
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    each(d, [](auto& s) { s.reset_accumulated(); });
    stats[d].num_alloc_retries = stats[d].num_ooms = 0;
  }
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard lock(m);
    each(d, [](auto& s) { s.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    return {sizes.at(d) - arenas.at(d).taken, sizes.at(d)};
  }
};
Memory& memory() {
  static auto* made = new Memory();
  return *made;
}
void release(void* b) {
  if (b) memory().free(static_cast<Block*>(b));
}
const bool has_allocator = (c10::SetAllocator(kCuda, &memory(), 1), true);

// ---- pinned memory: freed once every stream is past what was queued
// --------------------------------------------------
struct Pinned final : Allocator {
  std::mutex m;
  std::map<char*, int64_t> live;
  std::vector<std::pair<char*, std::vector<MarkPtr>>> waiting;
  static void give(void* p);
  DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &give, DeviceType::CPU};
    int64_t size = 1;
    while (size < (int64_t)n) size *= 2;
    auto* p = static_cast<char*>(std::aligned_alloc(512, std::max<int64_t>(size, 512)));
    if (poison) std::memset(p, 0xFF, size);
    std::lock_guard lock(m);
    live[p] = size;
    return {p, p, &give, DeviceType::CPU};
  }
  bool has(const void* p) {
    std::lock_guard lock(m);
    auto it = live.upper_bound((char*)p);
    return it != live.begin() && (--it, (char*)p < it->first + it->second);
  }
  void free(char* p) {
    std::lock_guard lock(m);
    live.erase(p);
    std::vector<MarkPtr> marks;
    for (auto& device : queues())
      for (auto& queue : device)
        if (queue->started && !queue->idle()) marks.push_back(mark(*queue));
    waiting.emplace_back(p, std::move(marks));
    std::erase_if(waiting, [](auto& one) {
      bool done = std::all_of(one.second.begin(), one.second.end(), [](auto& e) { return e->is_done(); });
      if (done) std::free(one.first);
      return done;
    });
  }
  int64_t bytes() {
    std::lock_guard lock(m);
    int64_t sum = 0;
    for (auto& [p, n] : live) sum += n;
    return sum;
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Pinned& pinned() {
  static auto* made = new Pinned();
  return *made;
}
void Pinned::give(void* p) {
  if (p) pinned().free(static_cast<char*>(p));
}

// ---- random numbers: seed and offset, as Philox has them
// -------------------------------------------------------------
struct Philox final : c10::GeneratorImpl {
  uint64_t seed_ = c10::detail::getNonDeterministicRandom(), offset_ = 0;
  Philox(DeviceIndex d) : GeneratorImpl(Device(kCuda, d), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t s) override { seed_ = s, offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    auto* from = static_cast<const uint64_t*>(state.data());
    seed_ = from[0], offset_ = state.numel() == 16 ? from[1] : 0;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    auto* to = static_cast<uint64_t*>(state.mutable_data_ptr());
    to[0] = seed_, to[1] = offset_;
    return state.getIntrusivePtr();
  }
  Philox* clone_impl() const override {
    auto* g = new Philox(device().index());
    g->seed_ = seed_, g->offset_ = offset_;
    return g;
  }
  static Generator draw(Philox& from) {  // a generator of the host for one kernel
    std::lock_guard lock(from.mutex_);
    auto mixed = (from.seed_ ^ (from.offset_ * 0x9E3779B97F4A7C15ull)) + 0xD1B54A32D192ED03ull;
    from.offset_ += 4;
    return at::detail::createCPUGenerator(mixed);
  }
};
const Generator& default_generator(DeviceIndex d) {
  static auto* all = [] {
    auto* made = new std::vector<Generator>();
    for (size_t i = 0; i < sizes.size(); i++) made->push_back(make_generator<Philox>(i));
    return made;
  }();
  return all->at(d < 0 ? device_here : d);
}

bool hands_default = false;
struct SimHooks final : CUDAHooksInterface {
  SimHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !sizes.empty(); }
  bool hasPrimaryContext(DeviceIndex) const override { return is_begun; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return sizes.size(); }
  void setCurrentDevice(DeviceIndex d) const override { device_here = d; }
  DeviceIndex getCurrentDevice() const override { return device_here; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(device_here, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? device_here : exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pinned().has(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  Allocator* getCUDADeviceAllocator() const override { return &memory(); }
  Device getDeviceFromPtr(void* p) const override { return memory().device_of(p); }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  Generator getNewGenerator(DeviceIndex d) const override {
    if (hands_default) return default_generator(d);
    return make_generator<Philox>(d < 0 ? device_here : d);
  }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return device_here; }
  int getNumGPUs() const override { return sizes.size(); }
  long versionCUDART() const override { return 12080; }
  std::string showConfig() const override { return "simulated"; }
  void deviceSynchronize(DeviceIndex d) const override { Guard().synchronizeDevice(d); }
};
}  // namespace
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimHooks)
}
namespace {

// ---- kernels
// ---------------------------------------------------------------------------------------------------------
Tensor on_host(const Tensor& t, std::map<c10::StorageImpl*, Storage>& seen) {  // the same memory as a kernel sees it
  auto* from = t.storage().unsafeGetStorageImpl();
  auto it = seen.find(from);
  if (it == seen.end()) {
    Storage made(Storage::use_byte_size_t{}, from->nbytes(), DataPtr(memory().host(from->data()), Device(kCPU)),
                 c10::GetAllocator(kCPU), true);
    it = seen.emplace(from, made).first;
  }
  auto out = at::detail::make_tensor<c10::TensorImpl>(Storage(it->second), DispatchKeySet(DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}
bool is_ours(const Tensor& t) { return t.defined() && t.is_cuda() && t.unsafeGetTensorImpl()->has_storage(); }
Tensor on_device(const Tensor& t, Device d) {  // a kernel's result; the stream is idle
  c10::DeviceGuard guard(d);
  auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(d));
  std::map<c10::StorageImpl*, Storage> seen;
  if (out.storage().nbytes()) {
    size_t n = std::min(out.storage().nbytes(), t.storage().nbytes() - t.storage_offset() * t.element_size());
    std::memcpy(memory().host(out.storage().data()), t.const_data_ptr(), n);
  }
  return out;
}
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  torch::jit::Stack args(stack->begin() + begin, stack->end()), on(args);
  std::optional<Device> device;
  std::map<c10::StorageImpl*, Storage> seen;
  std::map<c10::TensorImpl*, Tensor> aliases;
  std::vector<std::pair<Tensor, Tensor>> written;
  bool later = !in_order, drew = false;
  auto swap = [&](const Tensor& t, bool write) -> Tensor {
    if (!t.defined()) return t;
    if (!is_ours(t))
      return t.is_cpu() && t.numel() == 1 && !write ? t.detach().clone()
                                                    : (later = later && t.is_cpu() && t.dim() == 0, t);
    if (!device) device = t.device();
    auto& alias = aliases[t.unsafeGetTensorImpl()];
    if (!alias.defined()) alias = on_host(t, seen);
    if (write) {
      written.emplace_back(t, alias);
      later = later && t.numel() > 0;
    }
    return alias;
  };
  for (size_t i = 0; i < count; i++) {
    const auto& arg = schema.arguments()[i];
    const bool write = arg.alias_info() && arg.alias_info()->isWrite();
    auto& v = on[i];
    if (v.isTensor())
      v = swap(v.toTensor(), write);
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(swap(t, write));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : v.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(swap(*t, false)) : std::nullopt);
      v = list;
    } else if (v.isDevice()) {
      if (v.toDevice().is_cuda()) {
        if (!device) device = Device(kCuda, index_of(v.toDevice()));
        v = Device(kCPU);
      }
    }
  }
  if (!device) device = Device(kCuda, device_here);
  c10::DeviceGuard device_guard(*device);
  for (size_t i = 0; i < count; i++) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    auto given = args[i].isNone() ? default_generator(device->index()) : args[i].toGenerator();
    TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                given.device().type(), "'");
    on[i] = Philox::draw(*static_cast<Philox*>(given.unsafeGetGeneratorImpl())), drew = true;
  }
  const auto& returns = schema.returns();
  for (const auto& r : returns) later = later && r.alias_info() && r.alias_info()->isWrite();
  later = later && !written.empty();
  auto& queue = current(device->index());
  auto find = [&](const std::string& set) -> size_t {
    for (size_t i = 0; i < count; i++)
      if (auto* info = schema.arguments()[i].alias_info())
        for (auto& s : info->beforeSets())
          if (s.toUnqualString() == set) return i;
    TORCH_CHECK(false, schema.name(), ": no argument for a result");
  };
  const bool seeded = !drew && op.hasTag(at::Tag::nondeterministic_seeded);
  if (later && !seeded) {
    queue.put([op, on = std::move(on)]() mutable {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &on);
    });
    stack->erase(stack->begin() + begin, stack->end());
    for (const auto& r : returns) stack->push_back(args[find(r.alias_info()->beforeSets().begin()->toUnqualString())]);
    return;
  }
  queue.drain();
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto generator = at::detail::getDefaultCPUGenerator();
    Tensor state;
    if (seeded) {
      state = generator.get_state();
      auto drawn = Philox::draw(*static_cast<Philox*>(default_generator(device->index()).unsafeGetGeneratorImpl()));
      generator.set_current_seed(drawn.current_seed());
    }
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &on);
    if (seeded) generator.set_state(state);
  }
  for (auto& [given, alias] : written) {  // results that were given too small
    bool moved = alias.storage().data() != memory().host(given.storage().data());
    if (!moved && alias.sizes() == given.sizes() && alias.strides() == given.strides()) continue;
    given.resize_(alias.sizes());
    if (alias.strides() != given.strides())
      given.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    if (moved && alias.numel())
      std::memcpy(memory().host(given.storage().data()), alias.storage().data(),
                  std::min(alias.storage().nbytes(), given.storage().nbytes()));
  }
  stack->erase(stack->begin() + begin, stack->end());
  auto place = [&](const Tensor& t, const c10::AliasInfo* info) -> Tensor {
    if (!t.defined() || !t.is_cpu()) return t;
    if (info) {
      const Tensor base = args[find(info->beforeSets().begin()->toUnqualString())].toTensor();
      if (info->isWrite()) return base;
      auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, Storage(base.storage()),
                                                          base.key_set(), t.dtype());
      out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return out;
    }
    for (auto& [impl, alias] : aliases)
      if (t.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl())
        for (auto& a : args)
          if (a.isTensor() && a.toTensor().unsafeGetTensorImpl() == impl) return a.toTensor();
    return on_device(t, *device);
  };
  for (size_t i = 0; i < returns.size(); i++) {
    auto v = on[on.size() - returns.size() + i];
    auto* info = returns[i].alias_info();
    if (v.isTensor())
      v = place(v.toTensor(), info);
    else if (v.isTensorList()) {
      if (info && info->isWrite())
        v = args[find(info->beforeSets().begin()->toUnqualString())];
      else {
        c10::List<Tensor> list;
        for (const Tensor& t : v.toTensorVector()) list.push_back(place(t, nullptr));
        v = list;
      }
    }
    stack->push_back(v);
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  Device d(kCuda, index_of(*device));
  c10::DeviceGuard guard(d);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory(), DispatchKeySet(DispatchKey::CUDA),
                                   dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  Device d(kCuda, index_of(*device));
  c10::DeviceGuard guard(d);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory(),
                                           DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(t, size, stride, t.storage_offset());
}

void grow(c10::StorageImpl* storage, int64_t nbytes, DeviceIndex d) {
  if ((int64_t)storage->nbytes() >= nbytes && nbytes) return;
  c10::DeviceGuard guard(Device(kCuda, d));
  auto data = memory().allocate(nbytes);
  if (storage->data()) memory().copy_data(data.get(), storage->data(), std::min<int64_t>(storage->nbytes(), nbytes));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}
const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<MemoryFormat> format) {
  auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = t.unsafeGetTensorImpl();
  if (t.sizes() != wanted) impl->set_sizes_contiguous(wanted);
  int64_t nbytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && (int64_t)t.storage().nbytes() < nbytes)
    grow(t.storage().unsafeGetStorageImpl(), nbytes, t.get_device());
  if (format) impl->empty_tensor_restride(*format);
  return t;
}
Tensor& set_storage(Tensor& t, Storage from, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  int64_t nbytes =
      at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (impl->numel() && (int64_t)impl->storage().nbytes() < nbytes)
    grow(impl->storage().unsafeGetStorageImpl(), nbytes, t.get_device());
  return t;
}
Tensor& set_whole(Tensor& t, Storage from) {
  int64_t n = from.nbytes() / t.element_size();
  return set_storage(t, std::move(from), 0, c10::SymIntArrayRef({c10::SymInt(n)}), {});
}
Tensor& set_tensor(Tensor& t, const Tensor& from) {
  return set_storage(t, Storage(from.storage()), from.storage_offset(), c10::fromIntArrayRefSlow(from.sizes()),
                     c10::fromIntArrayRefSlow(from.strides()));
}
Tensor& set_none(Tensor& t) {
  return set_storage(t, Storage(Storage::use_byte_size_t{}, 0, &memory(), true), 0,
                     c10::SymIntArrayRef({c10::SymInt(0)}), {});
}

Scalar read(const Tensor& t) {
  std::map<c10::StorageImpl*, Storage> seen;
  current(t.get_device()).drain();
  return at::_local_scalar_dense(on_host(t, seen));
}
Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  TORCH_CHECK(to.defined() && from.defined(), "self or source is undefined");
  if (to.is_same(from) || !to.numel()) return to;
  std::map<c10::StorageImpl*, Storage> seen;
  auto host = [&](const Tensor& t) {
    if (t.is_cuda()) return on_host(t, seen);
    auto raw = at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(),
                             t.options().requires_grad(false).device(kCPU));
    if (t.is_conj()) raw._set_conj(true);
    if (t.is_neg()) raw._set_neg(true);
    return raw;
  };
  auto a = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return host(to);
  }();
  auto b = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return host(from);
  }();
  auto& queue = current(from.is_cuda() ? from.get_device() : to.get_device());
  auto* other = to.is_cuda() && from.is_cuda() && to.device() != from.device() ? &current(to.get_device()) : nullptr;
  if (other) queue.put([m = mark(*other)] { m->wait(); });
  queue.put(
      [a, b]() mutable {
        at::AutoDispatchBelowADInplaceOrView guard;
        a.copy_(b);
      },
      true);
  if (other) other->put([m = mark(queue)] { m->wait(); });
  auto pageable = [](const Tensor& t) { return t.is_cpu() && !pinned().has(t.data_ptr()); };
  if (in_order || ((to.is_cpu() || from.is_cpu()) && (!non_blocking || pageable(to) || pageable(from)))) queue.drain();
  return to;
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor t(to);
  copy(t, from, non_blocking);
  return to;
}
void record_stream(Tensor& t, Stream s) { memory().recordStream(t.storage().data_ptr(), s); }
bool is_set_to(const Tensor& a, const Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// fused attention, by the host's flash kernel
int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double p, bool,
               std::optional<double>, bool) {
  bool fits = p == 0 && q.dim() == 4 && k.size(3) == v.size(3) && q.size(1) == k.size(1) && q.stride(3) == 1 &&
              k.stride(3) == 1 && v.stride(3) == 1;
  auto& context = at::globalContext();
  if (fits && !mask && context.userEnabledFlashSDP() && q.scalar_type() != kFloat && q.scalar_type() != kDouble)
    return int64_t(sdp::SDPBackend::flash_attention);
  if (fits && context.userEnabledMemEfficientSDP() && q.scalar_type() != kDouble)
    return int64_t(sdp::SDPBackend::efficient_attention);
  return int64_t(sdp::SDPBackend::math);
}
struct Run {  // a host kernel on a device's tensors, at once
  std::map<c10::StorageImpl*, Storage> seen;
  Device device;
  at::AutoDispatchBelowADInplaceOrView guard;
  Run(const Tensor& t) : device(t.device()) { current(device.index()).drain(); }
  Tensor in(const Tensor& t) { return t.defined() ? on_host(t, seen) : t; }
  std::optional<Tensor> in(const std::optional<Tensor>& t) {
    return t && t->defined() ? std::optional<Tensor>(in(*t)) : std::nullopt;
  }
  Tensor out(const Tensor& t) { return t.defined() ? on_device(t, device) : t; }
};
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const std::optional<Tensor>& bias, bool, double p, bool causal,
                                                     std::optional<double> scale) {
  Run run(q);
  auto [o, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(run.in(q), run.in(k), run.in(v), p, causal, run.in(bias), scale);
  auto zero = at::zeros({}, at::TensorOptions(kLong));
  auto padded = at::constant_pad_nd(lse.contiguous(), {0, (32 - lse.size(2) % 32) % 32});  // as the kernel's tiles are
  return {run.out(o.transpose(1, 2).contiguous().transpose(1, 2)), run.out(padded), run.out(zero), run.out(zero)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& g, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor& bias, const Tensor& o,
                                                              const Tensor& lse, const Tensor&, const Tensor&, double p,
                                                              std::array<bool, 4>, bool causal,
                                                              std::optional<double> scale) {
  Run run(q);
  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      run.in(g), run.in(q), run.in(k), run.in(v), run.in(o),
      run.in(lse).slice(2, 0, q.size(2)).transpose(1, 2).contiguous().transpose(1, 2), p, causal,
      bias.defined() ? std::optional<Tensor>(run.in(bias)) : std::nullopt, scale);
  return {run.out(a), run.out(b), run.out(c), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double p, bool causal, bool, std::optional<double> scale) {
  Run run(q);
  auto [o, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(run.in(q), run.in(k), run.in(v), p, causal, std::nullopt, scale);
  auto state = at::zeros({2}, at::TensorOptions(kUInt64));
  return {run.out(o),
          run.out(lse.contiguous()),
          Tensor(),
          Tensor(),
          q.size(2),
          k.size(2),
          run.out(state),
          run.out(at::zeros({}, at::TensorOptions(kUInt64))),
          at::empty({0}, q.options())};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& o, const Tensor& lse, const Tensor&, const Tensor&,
                                                  c10::SymInt, c10::SymInt, double p, bool causal, const Tensor&,
                                                  const Tensor&, std::optional<double> scale) {
  Run run(q);
  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      run.in(g), run.in(q), run.in(k), run.in(v), run.in(o), run.in(lse).transpose(1, 2).contiguous().transpose(1, 2),
      p, causal, std::nullopt, scale);
  return {run.out(a), run.out(b), run.out(c)};
}

// where the device's kernels keep fp32 of 16-bit inputs, and the host's do not
bool is_short(const Tensor& t) { return t.scalar_type() == kBFloat16 || t.scalar_type() == kHalf; }
std::tuple<std::optional<Tensor>, std::optional<Tensor>> in_fp32(Run& run, const Tensor& x, IntArrayRef shape,
                                                                 const std::optional<Tensor>& w,
                                                                 const std::optional<Tensor>& b) {
  auto wide = [&](const std::optional<Tensor>& t) {
    auto on = run.in(t);
    return on && is_short(x) ? std::optional<Tensor>(on->to(kFloat)) : on;
  };
  auto weight = wide(w);
  if (!weight && is_short(x)) weight = at::ones(shape, at::TensorOptions(kFloat));
  return {weight, wide(b)};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, IntArrayRef shape, const std::optional<Tensor>& w,
                                              const std::optional<Tensor>& b, double eps) {
  Run run(x);
  auto [weight, bias] = in_fp32(run, x, shape, w, b);
  auto [y, mean, rstd] = at::native_layer_norm(run.in(x), shape, weight, bias, eps);
  return {run.out(y), run.out(mean), run.out(rstd)};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& g, const Tensor& x, IntArrayRef shape,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& w, const std::optional<Tensor>& b,
                                                       std::array<bool, 3> mask) {
  Run run(x);
  auto [weight, bias] = in_fp32(run, x, shape, w, b);
  auto [dx, dw, db] =
      at::native_layer_norm_backward(run.in(g), run.in(x), shape, run.in(mean), run.in(rstd), weight, bias, mask);
  auto back = [&](const Tensor& t, const std::optional<Tensor>& like) {
    return t.defined() && like && like->defined() ? run.out(t.to(like->scalar_type())) : Tensor();
  };
  return {run.out(dx), back(dw, w), back(db, b)};
}
template <Tensor& (*kernel)(Tensor&, const Tensor&, int64_t, bool)>
Tensor& softmax(const Tensor& x, int64_t dim, bool widens, Tensor& out) {
  Run run(x);
  auto from = run.in(x), to = run.in(out);
  kernel(to, widens ? from.to(kFloat) : from, dim, false);
  return out;
}
template <Tensor& (*kernel)(Tensor&, const Tensor&, const Tensor&, int64_t, ScalarType)>
Tensor& softmax_backward(const Tensor& g, const Tensor& y, int64_t dim, ScalarType dtype, Tensor& out) {
  Run run(g);
  auto to = run.in(out);
  if (dtype == g.scalar_type())
    kernel(to, run.in(g), run.in(y), dim, dtype);
  else {
    auto wide = at::empty(y.sizes(), at::TensorOptions(kFloat));
    kernel(wide, run.in(g), run.in(y), dim, kFloat);
    to.copy_(wide);
  }
  return out;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_none);
  m.impl("_local_scalar_dense", read);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&boxed>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&boxed>());
  m.impl("native_layer_norm", layer_norm);
  m.impl("native_layer_norm_backward", layer_norm_backward);
  m.impl("_softmax.out", softmax<at::_softmax_out>);
  m.impl("_log_softmax.out", softmax<at::_log_softmax_out>);
  m.impl("_softmax_backward_data.out", softmax_backward<at::_softmax_backward_data_out>);
  m.impl("_log_softmax_backward_data.out", softmax_backward<at::_log_softmax_backward_data_out>);
  m.impl("record_stream", record_stream);
  m.impl("is_set_to", is_set_to);
  m.impl("_fused_sdp_choice", choose);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
}
}  // namespace
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
}

extern "C" {
void sim_setup() {
  pthread_atfork(nullptr, nullptr, [] { forked = is_begun.load(); });
}
bool sim_bad_fork() { return forked; }
void sim_hand_default(bool on) { hands_default = on; }
void sim_init() { is_begun = true; }
int64_t sim_stat(int device, int array, int kind, int field) {  // of DeviceStats, in its order
  std::lock_guard lock(memory().m);
  memory().finish();
  auto& s = memory().stats.at(device);
  if (array == 9) return kind == 0 ? s.num_alloc_retries : kind == 1 ? s.num_ooms : memory().observed_oom;
  c10::CachingAllocator::StatArray* arrays[] = {
      &s.allocation,      &s.segment,        &s.active,       &s.inactive_split,
      &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes,
      &s.requested_bytes};
  auto& one = (*arrays[array])[kind];
  return field == 0 ? one.current : field == 1 ? one.peak : field == 2 ? one.allocated : one.freed;
}
void sim_sleep(int64_t us) {
  current(device_here).put([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}
int64_t sim_pinned() { return pinned().bytes(); }
}
