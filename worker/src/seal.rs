//! The seal: a second seccomp filter for strictly confined workers. The filter forbids system calls that a
//! worker needs only while it starts. The supervisor builds and sends the filter, and the worker installs it
//! before the first job.

use std::io;

/// A seccomp filter in the kernel's format.
pub(crate) struct Seal(Vec<libc::sock_filter>);

impl Seal {
    /// Decodes the filter from the welcome. The welcome contains the instructions in the kernel's memory layout.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let (instructions, rest) = bytes.as_chunks::<8>();
        let fits = !instructions.is_empty() && instructions.len() <= usize::from(u16::MAX) && rest.is_empty();
        if !fits {
            return Err("the seccomp filter from the supervisor is malformed".into());
        }
        let instruction = |&[low, high, jt, jf, a, b, c, d]: &[u8; 8]| libc::sock_filter {
            code: u16::from_ne_bytes([low, high]),
            jt,
            jf,
            k: u32::from_ne_bytes([a, b, c, d]),
        };
        Ok(Self(instructions.iter().map(instruction).collect()))
    }

    /// Installs the filter for all current and future threads of this process.
    pub(crate) fn install(&self) -> io::Result<()> {
        let program = libc::sock_fprog { len: self.0.len() as u16, filter: self.0.as_ptr().cast_mut() };
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
        // SAFETY: `program` is a local value, and its length matches the filter that it points to. The kernel
        // checks and copies the filter, and writes to neither `program` nor the filter.
        #[expect(unsafe_code, reason = "seccomp(2) has no safe form")]
        let result =
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program) };
        match result {
            0 => Ok(()),
            -1 => Err(io::Error::last_os_error()),
            thread => Err(io::Error::other(format!(
                "thread {thread} has a seccomp filter that the other threads do not have"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seal_rejects_incomplete_filter_instructions() {
        assert!(Seal::read(&[]).is_err());
        assert!(Seal::read(&[0; 9]).is_err());
        assert!(Seal::read(&[0; 16]).is_ok());
        // Only the kernel checks the meaning of the instructions.
        assert!(Seal::read(&[255; 8]).is_ok_and(|seal| seal.install().is_err()));
    }
}
