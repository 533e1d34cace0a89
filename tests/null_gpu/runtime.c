/* CUDA's runtime and driver for a device that does not exist: memory is the host's, kernels are not run.
 *
 * What is more than "success" here: memory (registered, bounded, zeroed), copies (a copy from the device into pinned
 * memory reaches the host at a synchronisation only), counts of copies that the host must wait for, device properties.
 *
 * NULL_GPU_DEVICES (1), NULL_GPU_LIMIT (bytes of all allocations together, 4 GiB) and NULL_GPU_NAME are read once.
 */
#include <driver_types.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK return 0
#define OUT_OF_MEMORY 2
#define TOTAL (80ull << 30)
#define MOST 65536

enum { DEVICE = 1, PINNED = 2 };
struct block { char *start; size_t size; int kind, device; };
struct copy { char *to, *bytes; size_t size; void *stream; struct copy *next; };

static struct block blocks[MOST];
static int count;
static size_t held;
static struct copy *pending, **last = &pending;
static long pageable;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;

static size_t number(const char *name, size_t otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtoull(value, 0, 10) : otherwise;
}

static int devices(void) { return number("NULL_GPU_DEVICES", 1); }

/* -- memory */

static struct block *find(const void *p) {
  for (int i = count - 1; i >= 0; i--)
    if ((char *)p >= blocks[i].start && (char *)p < blocks[i].start + blocks[i].size) return &blocks[i];
  return 0;
}

static int allocate(void **p, size_t size, int kind) {
  size_t whole = (size + 511) / 512 * 512;
  int failed = 1;
  pthread_mutex_lock(&lock);
  if (held + whole <= number("NULL_GPU_LIMIT", 4ull << 30) && count < MOST && (*p = aligned_alloc(512, whole))) {
    memset(*p, 0, whole);
    blocks[count++] = (struct block){*p, whole, kind, device};
    held += whole;
    failed = 0;
  } else fprintf(stderr, "null device: %zu bytes asked for, %zu held; NULL_GPU_LIMIT\n", size, held);
  pthread_mutex_unlock(&lock);
  return failed ? OUT_OF_MEMORY : 0;
}

static int release(void *p) {
  if (!p) OK;
  pthread_mutex_lock(&lock);
  struct block *b = find(p);
  int status = 1; /* cudaErrorInvalidValue: not ours, or freed before */
  if (b && b->start == p) {
    for (struct copy *c = pending; c; c = c->next)
      if (c->to >= b->start && c->to < b->start + b->size) c->to = 0;
    held -= b->size;
    *b = blocks[--count];
    free(p);
    status = 0;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int cudaMalloc(void **p, size_t n) { return allocate(p, n, DEVICE); }
int cudaMallocAsync(void **p, size_t n, void *s) { return allocate(p, n, DEVICE); }
int cudaHostAlloc(void **p, size_t n, unsigned f) { return allocate(p, n, PINNED); }
int cudaMallocHost(void **p, size_t n) { return allocate(p, n, PINNED); }
int cudaFree(void *p) { return release(p); }
int cudaFreeAsync(void *p, void *s) { return release(p); }
int cudaFreeHost(void *p) { return release(p); }
int cudaHostRegister(void *p, size_t n, unsigned f) {
  pthread_mutex_lock(&lock);
  if (count < MOST) blocks[count++] = (struct block){p, n, PINNED, device};
  pthread_mutex_unlock(&lock);
  OK;
}
int cudaHostUnregister(void *p) {
  pthread_mutex_lock(&lock);
  struct block *b = find(p);
  if (b) *b = blocks[--count];
  pthread_mutex_unlock(&lock);
  OK;
}
int cudaMemGetInfo(size_t *f, size_t *t) { *t = TOTAL; *f = TOTAL - held; OK; }

int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  pthread_mutex_lock(&lock);
  struct block *b = find(p);
  if (b) {
    a->type = b->kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = b->device;
    a->devicePointer = (void *)p;
    a->hostPointer = b->kind == PINNED ? (void *)p : 0;
  }
  pthread_mutex_unlock(&lock);
  OK;
}

/* -- copies: on the device at once and in order; into pinned memory when the host synchronises */

static void arrive(void *stream, int all) {
  pthread_mutex_lock(&lock);
  struct copy **at = &pending;
  while (*at) {
    struct copy *c = *at;
    if (!all && c->stream != stream) { at = &c->next; continue; }
    if (c->to) memcpy(c->to, c->bytes, c->size);
    *at = c->next;
    free(c->bytes);
    free(c);
  }
  last = at;
  pthread_mutex_unlock(&lock);
}

static int kind_of(const void *p) {
  pthread_mutex_lock(&lock);
  struct block *b = find(p);
  int kind = b ? b->kind : 0;
  pthread_mutex_unlock(&lock);
  return kind;
}

/* How often the host was made to wait by a copy called asynchronous: between the device and memory not pinned. */
long nullGpuPageableCopies(void) { return pageable; }

int cudaMemcpyAsync(void *to, const void *from, size_t n, int k, void *stream) {
  int there = kind_of(to), here = kind_of(from);
  if (there != here && (!there || !here)) __sync_fetch_and_add(&pageable, 1);
  if (there == PINNED && here == DEVICE) {
    struct copy *c = malloc(sizeof *c);
    *c = (struct copy){to, malloc(n ? n : 1), n, stream, 0};
    memcpy(c->bytes, from, n);
    pthread_mutex_lock(&lock);
    *last = c;
    last = &c->next;
    pthread_mutex_unlock(&lock);
    OK;
  }
  if (here == PINNED && there == DEVICE) arrive(0, 1); /* what stands in the source is known once earlier copies are done */
  memmove(to, from, n);
  OK;
}
int cudaMemcpy(void *to, const void *from, size_t n, int k) { arrive(0, 1); memmove(to, from, n); OK; }
int cudaMemcpyPeerAsync(void *to, int td, const void *from, int fd, size_t n, void *s) { memmove(to, from, n); OK; }
int cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, int k, void *s) {
  for (size_t i = 0; i < h; i++) memmove((char *)to + i * tp, (const char *)from + i * fp, w);
  OK;
}
int cudaMemset(void *p, int v, size_t n) { memset(p, v, n); OK; }
int cudaMemsetAsync(void *p, int v, size_t n, void *s) { memset(p, v, n); OK; }
int cudaStreamSynchronize(void *s) { arrive(s, 0); OK; }
int cudaEventSynchronize(void *e) { arrive(0, 1); OK; }
int cudaEventQuery(void *e) { arrive(0, 1); OK; }
int cudaDeviceSynchronize(void) { arrive(0, 1); OK; }

/* -- devices, streams, kernels */

int cudaGetDeviceCount(int *n) { *n = devices(); OK; }
int cudaGetDevice(int *d) { *d = device; OK; }
int cudaSetDevice(int d) { if (d < 0 || d >= devices()) return 101; device = d; OK; }
static void describe(struct cudaDeviceProp *p, int d) {
  const char *name = getenv("NULL_GPU_NAME");
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", name ? name : "null device (imitates H100, nothing measured)");
  p->uuid.bytes[0] = 0x6e; p->uuid.bytes[15] = d;
  p->pciBusID = d; p->major = 9; p->minor = 0; p->totalGlobalMem = TOTAL; p->multiProcessorCount = 132; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->regsPerMultiprocessor = 65536; p->regsPerBlock = 65536;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 50 << 20; p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->maxBlocksPerMultiProcessor = 32;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) { describe(p, d); OK; }
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { describe(p, d); OK; }
static int attribute(int *v, int a) { /* numbers of enum cudaDeviceAttr, which are those of CUdevice_attribute */
  *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 10 ? 32 : a == 81 || a == 97 ? 232448 : a == 12 || a == 82 ? 65536
     : a == 1 || a == 39 ? 1024 : a == 8 ? 49152 : 1;
  OK;
}
int cudaDeviceGetAttribute(int *v, int a, int d) { return attribute(v, a); }
int cudaDriverGetVersion(int *v) { *v = 13000; OK; }
int cudaRuntimeGetVersion(int *v) { *v = 13000; OK; }
int cudaDeviceGetPCIBusId(char *b, int n, int d) { snprintf(b, n, "0000:%02x:00.0", d); OK; }
int cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; OK; }
static int made(void **h) { *h = calloc(1, 16); OK; }
int cudaStreamCreate(void **s) { return made(s); }
int cudaStreamCreateWithFlags(void **s, unsigned f) { return made(s); }
int cudaStreamCreateWithPriority(void **s, unsigned f, int p) { return made(s); }
int cudaEventCreate(void **s) { return made(s); }
int cudaEventCreateWithFlags(void **s, unsigned f) { return made(s); }
int cudaEventElapsedTime(float *ms, void *a, void *b) { *ms = 1; OK; }
int cudaEventElapsedTime_v2(float *ms, void *a, void *b) { *ms = 1; OK; }
int cudaStreamIsCapturing(void *s, int *c) { *c = 0; OK; }
int cudaStreamGetCaptureInfo(void *s, int *c) { *c = 0; OK; }
int cudaStreamGetCaptureInfo_v2(void *s, int *c) { *c = 0; OK; }
int cudaStreamGetCaptureInfo_v3(void *s, int *c) { *c = 0; OK; }
int cudaStreamGetPriority(void *s, int *p) { *p = 0; OK; }
const char *cudaGetErrorString(int e) { return e == OUT_OF_MEMORY ? "out of memory (null device)" : "error of the null device"; }
const char *cudaGetErrorName(int e) { return cudaGetErrorString(e); }
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a); a->ptxVersion = a->binaryVersion = 90; a->maxThreadsPerBlock = 1024; a->numRegs = 32; OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) { *n = 2; OK; }

/* Grouped products describe their operands to the copy engine by a function of the driver. */
static int described(void) { OK; }
static int entry(const char *name, void **f, int *status) {
  if (!strcmp(name, "cuTensorMapEncodeTiled")) { *f = (void *)described; if (status) *status = 0; }
  OK;
}
int cudaGetDriverEntryPoint(const char *n, void **f, unsigned long long flags, int *s) { return entry(n, f, s); }
int cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v, unsigned long long flags, int *s) { return entry(n, f, s); }

/* -- driver, as Triton's launcher and torch read it */

int cuDriverGetVersion(int *v) { *v = 13000; OK; }
int cuDeviceGetCount(int *n) { *n = devices(); OK; }
int cuDeviceGet(int *d, int n) { *d = n; OK; }
int cuDeviceGetAttribute(int *v, int a, int d) { return attribute(v, a); }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : 0; OK; }
int cuCtxGetCurrent(void **c) { static int one; *c = &one; OK; }
int cuDevicePrimaryCtxRetain(void **c, int d) { return cuCtxGetCurrent(c); }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0; *active = 1; OK; }
int cuGetErrorString(int e, const char **s) { *s = "error of the null device"; OK; }
int cuGetErrorName(int e, const char **s) { *s = "error of the null device"; OK; }
int cuModuleLoadData(void **m, const void *image) { return made(m); }
int cuModuleGetFunction(void **f, void *m, const char *name) { return made(f); }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 16; OK; }
int cuPointerGetAttribute(void *data, int a, unsigned long long p) {
  struct cudaPointerAttributes of;
  cudaPointerGetAttributes(&of, (void *)p);
  if (a == 2) *(int *)data = of.type == cudaMemoryTypeDevice ? 2 : 1;           /* memory type */
  else if (a == 3 || a == 4) *(unsigned long long *)data = p;                    /* its address on either side */
  else if (a == 9) *(int *)data = of.device;
  else *(int *)data = 0;
  return of.type == cudaMemoryTypeUnregistered ? 1 : 0;
}

/* -- cuBLAS, cuDNN, NCCL, NVRTC: products are computed elsewhere or not at all */

int cublasCreate_v2(void **h) { return made(h); }
int cublasGetVersion_v2(void *h, int *v) { *v = 130100; OK; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; OK; }
int cublasGetMathMode(void *h, int *m) { *m = 0; OK; }
int cublasGetStream_v2(void *h, void **s) { *s = 0; OK; }
int cublasLtCreate(void **h) { return made(h); }
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
static int large(void **h) { *h = calloc(1, 256); OK; }
int cublasLtMatrixLayoutCreate(void **h) { return large(h); }
int cublasLtMatmulDescCreate(void **h) { return large(h); }
int cublasLtMatmulPreferenceCreate(void **h) { return large(h); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, char *results, int *found) {
  memset(results, 0, 128); *found = 1; OK;
}
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnCreate(void **h) { return made(h); }
int ncclGetVersion(int *v) { *v = 22907; OK; }
const char *ncclGetErrorString(int e) { return "null NCCL"; }
const char *ncclGetLastError(void *c) { return "null NCCL"; }
int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; OK; }

/* -- NVML: with PYTORCH_NVML_BASED_CUDA_CHECK torch asks here, and a process that did so may still fork */

int nvmlInit(void) { OK; }
int nvmlInit_v2(void) { OK; }
int nvmlDeviceGetCount_v2(int *n) { *n = devices(); OK; }
