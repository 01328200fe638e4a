//! Implements `library`, where each job is a call to a function in a C library, as described in `bulkhead.h`. Data from
//! the library is checked as far as C allows.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_double, c_int, c_void};
use std::process::ExitCode;
use std::sync::Arc;

use bulkhead_shared::Fault;
use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::process::{Resource, getrlimit};

use crate::context::{Ctx, Job};
use crate::reply::HandlerError;
use crate::server::Server;

const ABI_VERSION: u32 = 1;
const RETRYABLE: u32 = 1;
const CALLER_FAULT: u32 = 2;
const INIT_MESSAGE_BYTES: usize = 1024;

/// Stack size of handler threads in bytes, used if the limit on the stack size is unlimited.
const STACK_BYTES: usize = 8 << 20;
const STACK_BYTES_MIN: usize = 2 << 20;
const STACK_BYTES_MAX: usize = 64 << 20;

#[repr(C)]
struct CJob {
    struct_size: u32,
    reserved: u32,
    number: u64,
    operation: *const c_char,
    tenant: *const c_char,
    payload: *const u8,
    payload_len: usize,
    host_data: *mut c_void,
}

#[repr(C)]
struct CHost {
    struct_size: u32,
    abi_version: u32,
    result: extern "C-unwind" fn(*const CJob, *const c_void, usize) -> c_int,
    error: extern "C-unwind" fn(*const CJob, *const c_char, *const c_char, u32),
    is_cancelled: extern "C-unwind" fn(*const CJob) -> c_int,
    remaining_ms: extern "C-unwind" fn(*const CJob) -> u64,
    progress: extern "C-unwind" fn(*const CJob, c_double, *const c_char),
}

static HOST: CHost = CHost {
    struct_size: size_of::<CHost>() as u32,
    abi_version: ABI_VERSION,
    result: append_result,
    error: set_error,
    is_cancelled,
    remaining_ms,
    progress,
};

type Handle = unsafe extern "C-unwind" fn(*const CJob, *const CHost) -> c_int;
type Init = unsafe extern "C-unwind" fn(*mut c_char, usize) -> c_int;

/// State of a single call to the handler.
struct Call<'c> {
    ctx: &'c Ctx<Loaded>,
    result: RefCell<Vec<u8>>,
    is_too_large: RefCell<bool>,
    /// Error for a result that could not be copied.
    invalid_result: RefCell<Option<HandlerError>>,
    error: RefCell<Option<HandlerError>>,
}

/// A loaded library, which is never unloaded.
pub(super) struct Loaded {
    handle: Handle,
    /// Never closed, because threads may still be running the library's code.
    _library: std::mem::ManuallyDrop<Library>,
}

pub(super) fn run(path: &str, entry: &str) -> ExitCode {
    let (path, entry) = (Arc::<str>::from(path), Arc::<str>::from(entry));
    Server::new().init(move |_| load(&path, &entry)).handler(call).stack_bytes(stack_bytes()).serve()
}

/// Returns the stack size of handler threads, which is the limit on stacks (`rlimits.stack`). C libraries expect this
/// size.
fn stack_bytes() -> usize {
    let limit = getrlimit(Resource::Stack).current.and_then(|bytes| usize::try_from(bytes).ok());
    limit.map_or(STACK_BYTES, |bytes| bytes.clamp(STACK_BYTES_MIN, STACK_BYTES_MAX))
}

fn failed(message: String) -> HandlerError {
    HandlerError::new("library", message)
}

#[expect(unsafe_code, reason = "it is unsafe to load a C library and to call its functions")]
fn load(path: &str, entry: &str) -> Result<Loaded, HandlerError> {
    let inherited = super::inherited_program();
    let place = inherited.as_ref().map_or_else(|| path.to_owned(), super::place);
    // SAFETY: this process exists only to run the library, including its initialisers.
    let library = unsafe { Library::open(Some(place), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        let detail = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        failed(format!("failed to load {path}: {detail}"))
    })?;
    let library = std::mem::ManuallyDrop::new(library);
    // SAFETY: the header declares the marker with this type. A library without the marker is rejected before
    // any call.
    let version = unsafe { library.get::<*const u32>(b"bulkhead_abi_version\0") }.map_err(|_| {
        failed(format!(
            "{path} does not define bulkhead_abi_version: write BULKHEAD_LIBRARY from bulkhead.h once in the \
             library's source code"
        ))
    })?;
    // SAFETY: `dlsym` found the object, which is a `const uint32_t`.
    let version = unsafe { **version };
    if version != ABI_VERSION {
        return Err(failed(format!(
            "{path} was built for version {version} of bulkhead.h, but this host has version {ABI_VERSION}: \
             rebuild the library"
        )));
    }
    let symbol = CString::new(entry).map_err(|_| failed("the name of `entry` contains a NUL byte".into()))?;
    // SAFETY: the header declares the entry with this signature.
    let handle = unsafe { library.get::<Handle>(symbol.as_bytes_with_nul()) }
        .map_err(|_| failed(format!("{path} has no function {entry}: set `entry` in workers.toml")))?;
    // SAFETY: the header declares the function with this signature.
    if let Ok(init) = unsafe { library.get::<Init>(b"bulkhead_init\0") } {
        let mut message = [0_u8; INIT_MESSAGE_BYTES];
        // SAFETY: the buffer has the given size and outlives the call.
        let code = unsafe { init(message.as_mut_ptr().cast(), message.len()) };
        if code != 0 {
            let end = message.iter().position(|&b| b == 0).unwrap_or(message.len());
            let text = String::from_utf8_lossy(&message[..end]);
            return Err(failed(format!("bulkhead_init in {path} returned {code}: {text}")));
        }
    }
    Ok(Loaded { handle: *handle, _library: library })
}

fn call(job: &Job, ctx: &Ctx<Loaded>) -> Result<Vec<u8>, HandlerError> {
    let text = |name: &str| {
        CString::new(name).map_err(|_| {
            failed("the name of the operation or the tenant contains a NUL byte".into()).caller()
        })
    };
    let (operation, tenant) = (text(ctx.operation())?, text(ctx.tenant())?);
    let call = Call {
        ctx,
        result: RefCell::default(),
        is_too_large: RefCell::new(false),
        invalid_result: RefCell::default(),
        error: RefCell::default(),
    };
    let c_job = CJob {
        struct_size: size_of::<CJob>() as u32,
        reserved: 0,
        number: ctx.number(),
        operation: operation.as_ptr(),
        tenant: tenant.as_ptr(),
        payload: job.payload().as_ptr(),
        payload_len: job.payload().len(),
        host_data: (&raw const call).cast_mut().cast(),
    };
    // SAFETY: everything the structures point to outlives the call. Any other fault in the library affects only this
    // process.
    #[expect(unsafe_code, reason = "calls the C library")]
    let code = unsafe { (ctx.state().handle)(&c_job, &HOST) };
    if call.is_too_large.take() {
        let message = format!("the result is larger than max_result ({} bytes)", ctx.result_bytes_max());
        return Err(HandlerError::new(RESULT_TOO_LARGE, message));
    }
    match (code, call.invalid_result.take()) {
        (0, None) => Ok(call.result.take()),
        (0, Some(error)) => Err(error),
        (code, _) => Err(call.error.take().unwrap_or_else(|| HandlerError::new(format!("error_{code}"), ""))),
    }
}

/// Returns the handler call for a job pointer that the library has passed back.
#[expect(unsafe_code, reason = "the C library passes the pointer back")]
fn call_from_job<'c>(job: *const CJob) -> Option<&'c Call<'c>> {
    // SAFETY: the header requires that `job` is the pointer passed to the handler. It refers to a live call
    // until the handler returns. A library that breaks this rule harms only this process.
    unsafe { job.as_ref()?.host_data.cast::<Call<'c>>().as_ref() }
}

#[expect(unsafe_code, reason = "reads a string from C")]
fn text_from_c(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the header requires a NUL-terminated text.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[expect(unsafe_code, reason = "reads bytes from C")]
extern "C-unwind" fn append_result(job: *const CJob, data: *const c_void, len: usize) -> c_int {
    let Some(call) = call_from_job(job) else { return -1 };
    if len == 0 {
        return 0;
    }
    if data.is_null() {
        let message = format!("the library passed NULL as {len} bytes of the result");
        call.invalid_result.replace(Some(failed(message)));
        return -1;
    }
    let mut result = call.result.borrow_mut();
    let most = usize::try_from(call.ctx.result_bytes_max()).unwrap_or(usize::MAX);
    if len > most.saturating_sub(result.len()) {
        call.is_too_large.replace(true);
        return -1;
    }
    // SAFETY: the header requires `len` readable bytes.
    result.extend_from_slice(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) });
    0
}

extern "C-unwind" fn set_error(job: *const CJob, code: *const c_char, message: *const c_char, flags: u32) {
    let Some(call) = call_from_job(job) else { return };
    call.error.replace(Some(HandlerError {
        code: text_from_c(code),
        message: text_from_c(message),
        retryable: flags & RETRYABLE != 0,
        fault: if flags & CALLER_FAULT != 0 { Fault::Caller } else { Fault::Dependency },
    }));
}

extern "C-unwind" fn is_cancelled(job: *const CJob) -> c_int {
    call_from_job(job).is_some_and(|call| call.ctx.is_cancelled()).into()
}

extern "C-unwind" fn remaining_ms(job: *const CJob) -> u64 {
    call_from_job(job).map_or(0, |call| u64::try_from(call.ctx.remaining().as_millis()).unwrap_or(u64::MAX))
}

extern "C-unwind" fn progress(job: *const CJob, fraction: c_double, text: *const c_char) {
    if let Some(call) = call_from_job(job) {
        call.ctx.progress(fraction as f32, &text_from_c(text));
    }
}
