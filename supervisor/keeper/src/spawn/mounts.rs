//! One mount, as the child makes it.

use std::ffi::CStr;
use std::ptr::null;

use bulkhead_linux::errno::check;
use rustix::io::Errno;

pub(super) fn mount(
    from: Option<&CStr>,
    at: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> Result<(), Errno> {
    let pointer = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    // SAFETY: the texts end with NUL; null pointers stand for what this kind of mount has not.
    check(unsafe { libc::mount(pointer(from), at.as_ptr(), pointer(kind), flags, pointer(options).cast()) })
}
