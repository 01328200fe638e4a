//! Lists the resources of setrlimit(2) with their names, numbers, and labels in `/proc/PID/limits`. The configuration
//! and the keeper use the same table. No limit is read or set here; `spawn/steps.rs` of the keeper sets the limits of a
//! worker.

use rustix::process;

/// Defines an enum of resources. Each row contains a variant as spelled in rustix, the resource's name, and the
/// kernel's label for the resource.
macro_rules! resources {
    ($($resource:ident $name:literal $label:literal;)+) => {
        /// A resource of setrlimit(2).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Resource {
            $(#[doc = $label] $resource,)+
        }

        impl Resource {
            /// All resources.
            pub const ALL: [Self; 16] = [$(Self::$resource),+];

            /// Returns the resource's name in setrlimit(2), in lower case and without `RLIMIT_`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$resource => $name,)+
                }
            }

            /// Returns the resource's label in `/proc/PID/limits`.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$resource => $label,)+
                }
            }

            /// Returns the resource as the type that rustix uses for getrlimit(2) and setrlimit(2).
            pub const fn to_rustix(self) -> process::Resource {
                match self {
                    $(Self::$resource => process::Resource::$resource,)+
                }
            }
        }
    };
}

resources! {
    As "as" "Max address space";
    Cpu "cpu" "Max cpu time";
    Nofile "nofile" "Max open files";
    Nproc "nproc" "Max processes";
    Fsize "fsize" "Max file size";
    Core "core" "Max core file size";
    Data "data" "Max data size";
    Stack "stack" "Max stack size";
    Memlock "memlock" "Max locked memory";
    Rss "rss" "Max resident set";
    Locks "locks" "Max file locks";
    Sigpending "sigpending" "Max pending signals";
    Msgqueue "msgqueue" "Max msgqueue size";
    Nice "nice" "Max nice priority";
    Rtprio "rtprio" "Max realtime priority";
    Rttime "rttime" "Max realtime timeout";
}

impl Resource {
    /// Returns the number that the kernel uses for the resource.
    pub const fn number(self) -> u32 {
        self.to_rustix() as u32
    }

    /// Returns the resource with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| resource.name() == name)
    }

    /// Returns the resource with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| resource.number() == number)
    }
}

/// The kernel's number for the limit on open files (`RLIMIT_NOFILE`).
pub const OPEN_FILES: u32 = Resource::Nofile.number();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rlimit_labels_match_the_kernel() {
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        for resource in Resource::ALL {
            assert_eq!(Resource::from_name(resource.name()), Some(resource));
            assert_eq!(Resource::from_number(resource.number()), Some(resource));
            assert!(limits.lines().any(|line| line.starts_with(resource.label())), "{resource:?}: {limits}");
        }
        assert_eq!(Resource::from_name("files"), None);
    }
}
