//! The resources of setrlimit(2): their names, numbers, and what `/proc/PID/limits` calls them.

/// One resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Its name: that of setrlimit(2) in lower case, without `RLIMIT_`.
    pub name: &'static str,
    /// For getrlimit(2) and setrlimit(2).
    pub kind: rustix::process::Resource,
    /// The kernel's number.
    pub number: u32,
    /// What `/proc/PID/limits` calls it.
    pub label: &'static str,
}

macro_rules! resources {
    ($($name:literal $kind:ident $label:literal;)+) => {
        /// All of them.
        pub const RESOURCES: [Resource; 16] = [$(Resource {
            name: $name,
            kind: rustix::process::Resource::$kind,
            number: rustix::process::Resource::$kind as u32,
            label: $label,
        }),+];
    };
}

resources! {
    "as" As "Max address space";
    "core" Core "Max core file size";
    "cpu" Cpu "Max cpu time";
    "data" Data "Max data size";
    "fsize" Fsize "Max file size";
    "locks" Locks "Max file locks";
    "memlock" Memlock "Max locked memory";
    "msgqueue" Msgqueue "Max msgqueue size";
    "nice" Nice "Max nice priority";
    "nofile" Nofile "Max open files";
    "nproc" Nproc "Max processes";
    "rss" Rss "Max resident set";
    "rtprio" Rtprio "Max realtime priority";
    "rttime" Rttime "Max realtime timeout";
    "sigpending" Sigpending "Max pending signals";
    "stack" Stack "Max stack size";
}

/// The number of open files.
pub const OPEN_FILES: u32 = rustix::process::Resource::Nofile as u32;

/// The resource of this name.
pub fn named(name: &str) -> Option<Resource> {
    RESOURCES.into_iter().find(|resource| resource.name == name)
}

/// The resource with this number.
pub fn numbered(number: u32) -> Option<Resource> {
    RESOURCES.into_iter().find(|resource| resource.number == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_resource_is_found_and_the_kernel_calls_it_so() {
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        for resource in RESOURCES {
            assert_eq!(named(resource.name), Some(resource));
            assert_eq!(numbered(resource.number), Some(resource));
            assert!(limits.lines().any(|line| line.starts_with(resource.label)), "{resource:?}: {limits}");
        }
        assert_eq!((named("nofile").map(|it| it.number), named("files")), (Some(OPEN_FILES), None));
    }
}
