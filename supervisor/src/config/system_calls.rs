//! System calls by name.

/// Whether `name` can be that of a system call: which ones this kernel has is the filter's to know.
pub(super) fn is_system_call(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}
