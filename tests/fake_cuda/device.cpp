// Two CUDA devices that are not there: host memory behind the CUDA dispatch key of a CPU-only torch.
//
// Every operator runs on the processor (ATen's fallback), at once and in order. What a real device would do is
// checked beside it:
//   memory    fresh and freed memory holds NaN; a limit, and a failure at the n-th allocation, can be set
//   devices   an operator whose tensors are on different devices raises
//   traffic   bytes that cross to and from the device, and reads that wait for it, are told to Python
//   time      each stream has a vector clock. An access that no stream, event or wait orders after the one it
//             needs is a race, and raises. A non-blocking copy to the host arrives when the host waits for it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

using namespace at;

namespace {

constexpr int DEVICES = 2;
constexpr int SIDE_STREAMS = 8;                             // of each device, given out in turn
constexpr int SLOTS = 1 + DEVICES * (1 + SIDE_STREAMS);     // the host, and every stream
constexpr int HOST = 0;
constexpr int NOTHING = 0xFF;                               // each byte of memory that nobody wrote: a NaN
using Clock = std::array<uint64_t, SLOTS>;

std::recursive_mutex lock;                                  // of everything below
thread_local int device_now = 0;
thread_local std::array<int, DEVICES> current_stream{};     // numbers within the device; 0 is the default
thread_local int inside = 0;                                // of the fallback, whose own copies do not count

// ---- what Python is told -----------------------------------------------------------------------------------

enum What { TO_DEVICE, TO_HOST, WAIT };
using Told = void (*)(int what, int64_t bytes);
Told told = nullptr;

thread_local std::vector<std::pair<What, int64_t>> untold;
thread_local std::vector<Tensor> done_with;                 // whose release may need the GIL
thread_local int depth = 0;

void tell(What what, int64_t bytes) {
  if (told && !inside) untold.push_back({what, bytes});
}

struct Locked {                                             // What needs the GIL is done behind it: a thread that
  Locked() { lock.lock(); depth++; }                        // has the GIL may wait for the lock
  ~Locked() {
    depth--;
    lock.unlock();
    if (depth) return;
    auto now = std::move(untold);
    auto gone = std::move(done_with);
    untold.clear();
    done_with.clear();
    for (auto [what, bytes] : now) if (auto listener = told) listener(what, bytes);
  }
};

// ---- memory ------------------------------------------------------------------------------------------------

struct Access { int slot = HOST; uint64_t tick = 0; };

struct Block {
  void* data; int64_t size; int device; int slot;           // slot: the stream it was allocated on
  Access written; Clock read{}, shared{};                   // shared: `record_stream`
};

int64_t held[DEVICES], peak[DEVICES], limits[DEVICES], fail_in[DEVICES], allocations[DEVICES];
std::map<const void*, int64_t> pinned;                      // host memory, by its start
std::map<const void*, Block*> blocks;                       // device memory, by its start
std::array<Clock, SLOTS> clocks{};
std::string race;                                           // the first one; raised where it can be
int given_out[DEVICES];

int slot_of(int device, int stream) { return 1 + device * (1 + SIDE_STREAMS) + stream; }
int slot_here(int device) { return slot_of(device, current_stream[device]); }
std::string name_of(int slot) {
  int device = (slot - 1) / (1 + SIDE_STREAMS), stream = (slot - 1) % (1 + SIDE_STREAMS);
  return "stream " + std::to_string(stream) + " of cuda:" + std::to_string(device);
}
void note_race(const std::string& what) { if (race.empty()) race = what; }
void raise_race() {
  if (race.empty()) return;
  std::string what; std::swap(what, race);
  TORCH_CHECK(false, "race on the fake device: ", what);
}

void release(void* context) {
  Locked guard;
  auto block = static_cast<Block*>(context);
  for (int slot = 1; slot < SLOTS; slot++) {                // its next owner is of the stream it came from
    auto last = std::max(block->read[slot], block->written.slot == slot ? block->written.tick : 0);
    auto known = std::max({clocks[block->slot][slot], clocks[HOST][slot], block->shared[slot]});
    if (slot != block->slot && last > known)
      note_race("memory of " + name_of(block->slot) + " is freed while " + name_of(slot) + " uses it (record_stream)");
  }
  held[block->device] -= block->size;
  blocks.erase(block->data);
  if (block->size) std::memset(block->data, NOTHING, block->size);
  std::free(block->data);
  delete block;
}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t n) override {
    Locked guard;
    int device = device_now;
    int64_t size = (n + 511) / 512 * 512;
    allocations[device]++;
    bool fails = size && fail_in[device] > 0 && --fail_in[device] == 0;
    fails |= limits[device] > 0 && held[device] + size > limits[device];
    TORCH_CHECK_WITH(OutOfMemoryError, !fails, "CUDA out of memory (fake device). Tried to allocate ", size,
                     " bytes with ", held[device], " held");
    held[device] += size;
    peak[device] = std::max(peak[device], held[device]);
    void* data = size ? std::malloc(size) : nullptr;
    if (data) std::memset(data, NOTHING, size);
    int slot = slot_here(device);
    auto block = new Block{data, size, device, slot, {slot, clocks[slot][slot]}};
    if (data) blocks[data] = block;
    return {data, block, &release, Device(kCUDA, device)};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(kCUDA, &device_memory)

void unpin(void* data) {
  Locked guard;
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : HostAllocator {
  DataPtr allocate(size_t n) override {
    Locked guard;
    void* data = std::malloc(std::max<size_t>(n, 1));
    std::memset(data, NOTHING, n);
    pinned[data] = n;
    return {data, data, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(kCUDA, &pinned_memory)

bool is_pinned(const void* data) {
  Locked guard;
  auto next = pinned.upper_bound(data);
  if (next == pinned.begin()) return false;
  auto [start, size] = *--next;
  return static_cast<const char*>(data) < static_cast<const char*>(start) + std::max<int64_t>(size, 1);
}

// ---- streams, and copies that have not arrived -------------------------------------------------------------

struct Pending {                                            // a non-blocking copy between device and pinned memory
  int slot; uint64_t tick;
  Tensor host;                                              // its end on the host
  Tensor values;                                            // as they left the other end
  bool to_host;
};
std::vector<Pending> pending;

void join(Clock& mine, const Clock& other) {
  for (int i = 0; i < SLOTS; i++) mine[i] = std::max(mine[i], other[i]);
}

void host_waits(const Clock& until) {                       // copies that lie before it have now arrived
  join(clocks[HOST], until);
  std::vector<Pending> later;
  for (auto& one : pending) {
    if (one.tick > clocks[HOST][one.slot]) { later.push_back(one); continue; }
    if (one.to_host) std::memcpy(one.host.data_ptr(), one.values.data_ptr(), one.values.nbytes());
    else if (std::memcmp(one.host.data_ptr(), one.values.data_ptr(), one.values.nbytes()) != 0)
      note_race("pinned memory was changed while it was copied to the device");
    done_with.push_back(one.host);
    done_with.push_back(one.values);
  }
  pending.swap(later);
}

int begin(int device) {                                     // the next operation of this thread's stream
  int slot = slot_here(device);
  join(clocks[slot], clocks[HOST]);
  clocks[slot][slot]++;
  return slot;
}

Block* block_of(const Tensor& t) {
  if (!t.defined() || !t.is_cuda() || !t.has_storage()) return nullptr;
  return static_cast<Block*>(t.storage().data_ptr().get_context());
}

void access(Block* block, int slot, bool writes) {
  if (!block || !block->size) return;
  auto knows = [&](int other, uint64_t tick) { return other == slot || tick <= clocks[slot][other]; };
  if (!knows(block->written.slot, block->written.tick))
    note_race(name_of(slot) + " uses what " + name_of(block->written.slot) + " may still be writing");
  if (writes) for (int other = 1; other < SLOTS; other++)
    if (!knows(other, block->read[other])) note_race(name_of(slot) + " overwrites what " + name_of(other) + " may still read");
  if (writes) block->written = {slot, clocks[slot][slot]};
  else block->read[slot] = clocks[slot][slot];
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, device_now); }
  Device exchangeDevice(Device d) const override { auto was = getDevice(); setDevice(d); return was; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) device_now = d.index(); }
  static int device_of(Device d) { return d.index() < 0 ? device_now : d.index(); }
  static Stream stream(int device, int number) { return Stream(Stream::UNSAFE, Device(kCUDA, device), number); }
  static int slot(const Stream& s) { return slot_of(s.device_index(), s.id()); }
  Stream getStream(Device d) const override { return stream(device_of(d), current_stream[device_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(device_of(d), 0); }
  Stream getNewStream(Device d, int) const override {
    Locked guard;
    return stream(device_of(d), 1 + given_out[device_of(d)]++ % SIDE_STREAMS);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto was = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return was;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Locked guard;
    join(clocks[slot(s)], clocks[HOST]);
    delete static_cast<Clock*>(*event);
    *event = new Clock(clocks[slot(s)]);
  }
  void block(void* event, const Stream& s) const override {
    Locked guard;
    if (event) join(clocks[slot(s)], *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  bool queryEvent(void* event) const override { synchronizeEvent(event); return true; }
  void synchronizeEvent(void* event) const override { if (event) synchronize(*static_cast<Clock*>(event)); }
  bool queryStream(const Stream& s) const override { synchronizeStream(s); return true; }
  void synchronizeStream(const Stream& s) const override { synchronize(clocks[slot(s)]); }
  static void synchronize(const Clock& until) {             // a wait, unless the host has waited for later work
    Locked guard;
    auto before = clocks[HOST];
    host_waits(until);
    if (clocks[HOST] != before) tell(WAIT, 0);
    raise_race();
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    for (int number = 0; number <= SIDE_STREAMS; number++) synchronizeStream(stream(d < 0 ? device_now : d, number));
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& s) const override {
    Locked guard;
    auto owner = static_cast<Block*>(data.get_context());
    if (owner) owner->shared[slot(s)] = UINT64_MAX;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
const Guard guard_of_devices;

struct CUDAHooks final : CUDAHooksInterface {  // ATen asks for it by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  DeviceIndex current_device() const override { return device_now; }
  int getNumGPUs() const override { return DEVICES; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, device_now); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- operators ---------------------------------------------------------------------------------------------

struct Inside { Inside() { inside++; } ~Inside() { inside--; } };

Device device_wanted(std::optional<Device> d) {
  return Device(kCUDA, Guard::device_of(d.value_or(Device(kCUDA, device_now))));
}

Tensor empty_on_device(IntArrayRef size, std::optional<ScalarType> kind, std::optional<Layout>, std::optional<Device> d,
                       std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_wanted(d));
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA), kind.value_or(kFloat), format);
}

Tensor empty_strided_on_device(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> kind,
                               std::optional<Layout>, std::optional<Device> d, std::optional<bool>) {
  c10::DeviceGuard guard(device_wanted(d));
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), kind.value_or(kFloat));
}

Tensor on_host(const Tensor& t) {                           // the same memory, as a tensor of the host
  if (!t.is_cuda()) return t;
  void* data = t.storage().unsafeGetStorageImpl()->mutable_data() ? t.data_ptr() : nullptr;
  return at::from_blob(data, t.sizes(), t.strides(), TensorOptions().dtype(t.dtype()).device(kCPU));
}

void copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel()) return;
  if (inside) { on_host(to).copy_(on_host(from)); return; }
  Locked guard;
  int64_t bytes = from.numel() * static_cast<int64_t>(from.element_size());
  int device = to.is_cuda() ? to.get_device() : from.get_device();
  int slot = begin(device);
  access(block_of(from), slot, false);
  access(block_of(to), slot, true);
  if (to.is_cuda() && from.is_cuda() && to.get_device() != from.get_device()) access(block_of(to), begin(to.get_device()), true);
  raise_race();
  const Tensor& host = to.is_cuda() ? from : to;
  bool crosses = to.is_cuda() != from.is_cuda();
  bool later = crosses && non_blocking && is_pinned(host.data_ptr()) && host.is_contiguous() && to.dtype() == from.dtype();
  if (crosses) tell(to.is_cuda() ? TO_DEVICE : TO_HOST, bytes);
  if (later && !to.is_cuda()) {
    pending.push_back({slot, clocks[slot][slot], to, on_host(from).contiguous().clone(), true});
    std::memset(to.data_ptr(), NOTHING, to.nbytes());
    return;
  }
  on_host(to).copy_(on_host(from));
  if (later) pending.push_back({slot, clocks[slot][slot], from, from.clone(), false});
  else if (crosses && !(non_blocking && to.is_cuda())) {    // pageable memory is staged: the host may go on
    tell(WAIT, bytes);
    host_waits(clocks[slot]);
  }
}

Tensor& copy_into(Tensor& to, const Tensor& from, bool non_blocking) { copy(to, from.expand(to.sizes()), non_blocking); return to; }
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) { copy(to, from.expand(to.sizes()), non_blocking); return to; }
const Tensor& resize(const Tensor& t, IntArrayRef size, std::optional<MemoryFormat>);

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) { if (to.is_cuda()) resize(to, from.sizes(), {}); else to.resize_(from.sizes()); }
  copy(to, from, false);
  return to;
}

Scalar item(const Tensor& t) {
  Locked guard;
  int slot = begin(t.get_device());
  access(block_of(t), slot, false);
  raise_race();
  tell(TO_HOST, t.element_size());
  tell(WAIT, t.element_size());
  host_waits(clocks[slot]);
  return at::_local_scalar_dense(on_host(t));
}

const Tensor& resize(const Tensor& t, IntArrayRef size, std::optional<MemoryFormat>) {
  int64_t need = t.storage_offset() * t.element_size(), bytes = t.element_size();
  for (auto s : size) bytes *= s;
  auto storage = t.storage().unsafeGetStorageImpl();
  if (static_cast<int64_t>(storage->nbytes()) < need + bytes) {
    c10::DeviceGuard guard(t.device());
    auto fresh = device_memory.allocate(need + bytes);
    if (storage->nbytes()) std::memcpy(fresh.get(), storage->mutable_data(), storage->nbytes());
    storage->set_data_ptr(std::move(fresh));
    storage->set_nbytes(need + bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

void record_stream(Tensor& t, Stream s) { guard_of_devices.recordDataPtrOnStream(t.storage().data_ptr(), s); }

// Operators that take host tensors beside those of a device: indices that travel, and copies.
const std::set<std::string> MAY_MIX = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"};
const std::set<std::string> READS_BACK = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"};

template <typename F> void each_tensor(const IValue& value, F visit) {
  if (value.isTensor()) { if (value.toTensor().defined()) visit(value.toTensor()); }
  else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) { if (t.defined()) visit(t); }
  else if (value.isOptionalTensorList()) for (const auto& t : value.toOptionalTensorVector()) if (t && t->defined()) visit(*t);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  int device = -1;
  bool host = false;
  int64_t travels = 0;
  std::vector<std::pair<Block*, bool>> used;
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite(), indices = arguments[i].isOptionalTensorList();
    each_tensor(arguments[i], [&](const Tensor& t) {
      if (t.is_cuda()) {
        TORCH_CHECK(device < 0 || device == t.get_device(), "Expected all tensors to be on the same device, but found cuda:",
                    device, " and ", t.device(), " (", schema.name(), ")");
        device = t.get_device();
        used.push_back({block_of(t), writes});
      } else if (t.dim() > 0 && t.is_cpu()) { host = true; travels += indices ? t.nbytes() : 0; }
    });
  }
  TORCH_CHECK(!host || device < 0 || MAY_MIX.count(schema.name()), "Expected all tensors to be on the same device, but found at "
              "least two devices, cuda:", device, " and cpu! (", schema.name(), ")");
  c10::DeviceGuard guard(Device(kCUDA, device < 0 ? device_now : device));
  {
    Locked held_here;
    if (!inside) {
      int slot = begin(device_now);
      for (auto [block, writes] : used) access(block, slot, writes);
      raise_race();
      if (travels && device >= 0) tell(TO_DEVICE, travels);
      if (READS_BACK.count(schema.name())) { tell(TO_HOST, 8); tell(WAIT, 8); host_waits(clocks[slot]); }
    }
  }
  Inside copies_do_not_count;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_on_device);
  m.impl("empty_strided", &empty_strided_on_device);
  m.impl("copy_", &copy_into);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

extern "C" {
int fake_resize_storage(c10::StorageImpl* storage, int64_t bytes) {  // false: memory is full
  try {
    c10::DeviceGuard guard(storage->device());
    auto fresh = device_memory.allocate(bytes);
    auto both = std::min<int64_t>(bytes, storage->nbytes());
    if (both) std::memcpy(fresh.get(), storage->mutable_data(), both);
    storage->set_data_ptr(std::move(fresh));
    storage->set_nbytes(bytes);
    return true;
  } catch (const OutOfMemoryError&) { return false; }
}
int64_t fake_held(int device) { return held[device]; }
int64_t fake_peak(int device) { return peak[device]; }
void fake_reset_peak(int device) { Locked guard; peak[device] = held[device]; }
int64_t fake_allocations(int device) { return allocations[device]; }
void fake_limit(int device, int64_t bytes) { limits[device] = bytes; }
void fake_fail_in(int device, int64_t allocations_from_now) { fail_in[device] = allocations_from_now; }
int fake_device() { return device_now; }
int fake_stream() { return current_stream[device_now]; }  // of this thread
void fake_set_device(int device) { guard_of_devices.uncheckedSetDevice(Device(kCUDA, device)); }
void fake_told(Told to) { told = to; }
// A kernel that Triton's interpreter runs, and the device memory that it uses.
void fake_kernel(int device) { Locked guard; begin(device); }
void fake_access(void* data, int device, int writes) {
  Locked guard;
  auto found = blocks.find(data);
  if (found != blocks.end()) access(found->second, slot_here(device), writes);
}
const char* fake_race() {                                   // and forget it
  static std::string what;
  Locked guard;
  what.clear(); std::swap(what, race);
  return what.c_str();
}
}
