//! Parses the address of the admin API, which is a socket or a host with a port, and reads a host's token. `requests`
//! opens the connections.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use hyper::Uri;
use hyper::header::HeaderValue;

use crate::output::{Failure, exit};

/// Maximum size of a token in bytes, the same as in the supervisor.
const TOKEN_BYTES_MAX: usize = 4096;

/// Maximum number of bytes to read from a token file, including any whitespace around the token.
const FILE_BYTES_MAX: u64 = 2 * TOKEN_BYTES_MAX as u64;

/// Address of the admin API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Path of the admin socket.
    Socket(PathBuf),
    Host(Host),
}

/// Address of the admin API over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Host name or IP address, without brackets.
    pub(crate) name: String,
    pub(crate) port: u16,
    /// Host and port as written in the URL.
    pub(crate) authority: String,
    pub(crate) token_file: Option<PathBuf>,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Host(host) => write!(f, "http://{}", host.authority),
        }
    }
}

impl Host {
    /// Parses a URL such as `http://127.0.0.1:9464`. Returns an error message if the URL is not usable.
    pub(crate) fn parse(url: &str, token_file: Option<PathBuf>) -> Result<Self, String> {
        let example = "use a URL such as http://127.0.0.1:9464";
        let uri: Uri = url.parse().map_err(|error| format!("{error}; {example}"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(
                    "the supervisor does not speak TLS; connect to a forwarded port, for example with \
                            `ssh -L 9464:127.0.0.1:9464 HOST`, or to a proxy on this machine"
                        .into(),
                );
            }
            _ => return Err(format!("http:// is missing; {example}")),
        }
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
        let authority = authority.ok_or("user names are not supported; use --token-file")?;
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(format!("there is extra text after the port; {example}"));
        }
        let port = uri.port_u16().ok_or_else(|| format!("the port is missing; {example}"))?;
        if port == 0 {
            return Err("port 0 cannot be used; the supervisor's log shows the actual port".into());
        }
        let name = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { name, port, authority: authority.as_str().to_owned(), token_file })
    }

    /// Reads the token and returns the value of the `Authorization` header.
    pub(crate) fn authorization(&self) -> Result<Option<HeaderValue>, Failure> {
        let Some(file) = &self.token_file else { return Ok(None) };
        let fail = |problem: &dyn fmt::Display| {
            Failure::new(exit::USAGE, format!("failed to read the token file {}: {problem}", file.display()))
        };
        let mut text = String::new();
        // The number of bytes to read is limited, because a file such as /dev/zero has no end.
        let read = File::open(file).and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
        read.map_err(|error| fail(&error))?;
        let token = text.trim();
        if token.is_empty() || token.len() > TOKEN_BYTES_MAX || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(fail(&"the file must contain the token and nothing else"));
        }
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|error| fail(&error))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_requires_plain_http_url_with_port() {
        for (url, name, port) in [
            ("http://127.0.0.1:9464", "127.0.0.1", 9464),
            ("http://bulkhead.example:80/", "bulkhead.example", 80),
            ("http://[::1]:9464", "::1", 9464),
        ] {
            let host = Host::parse(url, None).unwrap();
            assert_eq!((host.name.as_str(), host.port), (name, port), "{url}");
            assert_eq!(Target::Host(host).to_string(), url.trim_end_matches('/'));
        }
        for (url, part) in [
            ("127.0.0.1:9464", "http:// is missing"),
            ("localhost", "http:// is missing"),
            ("ftp://localhost:21", "http:// is missing"),
            ("https://localhost:9464", "TLS"),
            ("http://localhost", "port is missing"),
            ("http://localhost:", "port is missing"),
            ("http://localhost:0", "port 0"),
            ("http://me:secret@localhost:9464", "--token-file"),
            ("http://localhost:9464/v1", "after the port"),
            ("http://localhost:9464?x=1", "after the port"),
            ("", ";"),
            ("http://", ";"),
            ("http://a b:1", ";"),
        ] {
            let message = Host::parse(url, None).unwrap_err();
            assert!(message.contains(part), "{url}: {message}");
        }
    }
}
