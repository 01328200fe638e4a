//! Returns random numbers from the kernel, for IDs, nonces and random delays. The decisions in `decide` get such
//! numbers from the agent instead of calling this module, so that tests can repeat them.

/// Returns a random number.
pub(crate) fn number() -> u64 {
    let mut bytes = [0; 8];
    // Cannot fail, because the kernel gathers enough entropy before services start.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}

/// Returns a random number from 0 to 1.
pub(crate) fn fraction() -> f64 {
    number() as f64 / u64::MAX as f64
}

/// Returns 16 random hexadecimal digits.
pub(crate) fn text() -> String {
    format!("{:016x}", number())
}
