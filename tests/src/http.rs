//! A minimal HTTP client that can also send malformed requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use socket2::{Domain, Type};

use crate::{PATIENCE, Supervisor, wait_for};

/// Address of a supervisor's admin API.
#[derive(Clone, Debug)]
pub enum Place {
    /// The admin socket.
    Unix(PathBuf),
    /// The TCP address set by the `http` key.
    Tcp(SocketAddr),
}

/// A connection to the admin API.
#[derive(Debug)]
pub enum Socket {
    /// A connection to the admin socket.
    Unix(UnixStream),
    /// A TCP connection.
    Tcp(TcpStream),
}

impl Place {
    /// Returns the address of a supervisor's admin socket.
    pub fn of(supervisor: &Supervisor) -> Self {
        Self::Unix(supervisor.file("admin.sock"))
    }

    /// Returns the TCP address of a supervisor's admin API. The address is taken from the log, because the kernel
    /// chooses the port if the configured port is 0.
    pub fn tcp(supervisor: &Supervisor) -> Self {
        let address = wait_for("the log has the address", || {
            let log = supervisor.log();
            let (_, rest) = log.split_once("http on ")?;
            rest.split(char::is_whitespace).next()?.parse().ok()
        });
        Self::Tcp(address)
    }

    /// Returns a supervisor's `jobs_http` address, which is taken from the log.
    pub fn jobs_http(supervisor: &Supervisor) -> Self {
        let address = wait_for("the log has the address", || {
            let log = supervisor.log();
            let (_, rest) = log.split_once("jobs_http on ")?;
            rest.split(char::is_whitespace).next()?.parse().ok()
        });
        Self::Tcp(address)
    }

    /// Opens a connection that can be used for several requests; see [`Place::connect`].
    pub fn keep_alive(&self) -> KeptAlive {
        KeptAlive(BufReader::new(self.connect()))
    }

    /// Connects to the admin API. The timeout for reads and writes is [`PATIENCE`].
    pub fn connect(&self) -> Socket {
        let socket = match self {
            Self::Unix(path) => {
                Socket::Unix(UnixStream::connect(path).expect("the admin socket accepts connections"))
            }
            Self::Tcp(address) => Socket::Tcp(TcpStream::connect(address).expect("a listener")),
        };
        socket.give_up_after(PATIENCE);
        socket
    }

    /// Connects over TCP with a small receive buffer and small segments. The kernel then accepts less than 64 KiB from a
    /// supervisor whose client does not read.
    pub fn connect_with_small_buffers(&self) -> TcpStream {
        let Self::Tcp(address) = self else { panic!("{self:?} is not a TCP address") };
        let socket = socket2::Socket::new(Domain::for_address(*address), Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(2048).unwrap();
        // The kernel's minimum. The supervisor's send buffer is proportional to this size.
        socket.set_tcp_mss(88).unwrap();
        socket.connect(&(*address).into()).expect("a listener");
        let socket = TcpStream::from(socket);
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    /// Sends a complete request and reads the response.
    pub fn ask(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let mut socket = self.connect();
        socket.send_head(method, path, headers, Some(body.len()));
        // Fails if the supervisor has rejected the request early and closed the connection.
        let _ = socket.write_all(body);
        Answer::read(socket).unwrap_or_else(|| panic!("no response to {method} {path}"))
    }

    /// Sends a job with the given operation and payload.
    pub fn job(&self, bulkhead: &str, operation: &str, headers: &[&str], payload: &[u8]) -> Answer {
        let operation = format!("Bulkhead-Operation: {operation}");
        let mut all = vec![operation.as_str()];
        all.extend(headers);
        self.ask("POST", &format!("/v1/bulkheads/{bulkhead}/jobs"), &all, payload)
    }
}

impl Socket {
    /// Sends the request line and headers of a request. `length` is the value of `Content-Length`, or `None` to omit
    /// this header.
    pub fn send_head(&mut self, method: &str, path: &str, headers: &[&str], length: Option<usize>) {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        if !headers.iter().any(|header| header.starts_with("Host:")) {
            head += "Host: localhost\r\n";
        }
        if let Some(length) = length {
            head += &format!("Content-Length: {length}\r\n");
        }
        for header in headers {
            head += &format!("{header}\r\n");
        }
        let _ = self.write_all(format!("{head}\r\n").as_bytes());
    }

    /// Sets the timeout for reads and writes.
    pub fn give_up_after(&self, time: Duration) {
        let time = Some(time);
        let set = match self {
            Self::Unix(socket) => socket.set_read_timeout(time).and(socket.set_write_timeout(time)),
            Self::Tcp(socket) => socket.set_read_timeout(time).and(socket.set_write_timeout(time)),
        };
        set.expect("an open socket");
    }

    /// Shuts down the sending half of the connection.
    pub fn end_sending(&self) {
        let ended = match self {
            Self::Unix(socket) => socket.shutdown(Shutdown::Write),
            Self::Tcp(socket) => socket.shutdown(Shutdown::Write),
        };
        ended.expect("an open socket");
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.read(buffer),
            Self::Tcp(socket) => socket.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.write(bytes),
            Self::Tcp(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A keep-alive connection, which can be used for several requests.
#[derive(Debug)]
pub struct KeptAlive(BufReader<Socket>);

impl KeptAlive {
    /// Wraps an open connection.
    pub fn new(socket: TcpStream) -> Self {
        let socket = Socket::Tcp(socket);
        socket.give_up_after(PATIENCE);
        Self(BufReader::new(socket))
    }

    /// Sends a request and reads the response. Returns `None` if the connection is closed before the response is
    /// complete.
    pub fn ask(&mut self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Option<Answer> {
        self.send(method, path, headers, body);
        self.answer()
    }

    /// Sends a request. Ignores write errors, because a closed connection is detected when the response is read.
    pub fn send(&mut self, method: &str, path: &str, headers: &[&str], body: &[u8]) {
        self.socket().send_head(method, path, headers, Some(body.len()));
        let _ = self.socket().write_all(body);
    }

    /// Returns the socket, so that a request can be sent in parts.
    pub fn socket(&mut self) -> &mut Socket {
        self.0.get_mut()
    }

    /// Reads the next response.
    pub fn answer(&mut self) -> Option<Answer> {
        Answer::read_from(&mut self.0)
    }

    /// Returns true if the peer has closed the connection cleanly, without sending another response.
    pub fn is_closed(&mut self) -> bool {
        self.0.fill_buf().is_ok_and(<[u8]>::is_empty)
    }
}

/// A complete HTTP response.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Headers, by lowercase name. If a header is repeated, its values are joined with commas.
    pub headers: BTreeMap<String, String>,
    /// Body without chunk framing.
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads a complete response. Returns `None` if the connection is closed before the response is complete.
    pub fn read(socket: Socket) -> Option<Self> {
        Self::read_from(&mut BufReader::new(socket))
    }

    fn read_from(mut reader: &mut BufReader<Socket>) -> Option<Self> {
        let (mut status, mut headers) = read_head(reader)?;
        while status == 100 {
            (status, headers) = read_head(reader)?;
        }
        let mut body = Vec::new();
        if headers.get("transfer-encoding").is_some_and(|value| value == "chunked") {
            loop {
                let mut size = String::new();
                reader.read_line(&mut size).ok()?;
                let size = usize::from_str_radix(size.trim_end(), 16).ok()?;
                let mut chunk = vec![0; size + 2];
                reader.read_exact(&mut chunk).ok()?;
                if size == 0 {
                    break;
                }
                body.extend_from_slice(&chunk[..size]);
            }
        } else if let Some(length) = headers.get("content-length") {
            let length = length.parse().ok()?;
            (&mut reader).take(length).read_to_end(&mut body).ok()?;
            if body.len() as u64 != length {
                return None;
            }
        } else {
            reader.read_to_end(&mut body).ok()?;
        }
        Some(Self { status, headers, body })
    }

    /// Returns the value of a header, or an empty string if the header is absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// Returns the body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Checks that the response is a valid problem document with the given status, and returns the document.
    #[track_caller]
    pub fn problem(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), "application/problem+json", "{}", self.text());
        let problem = self.json();
        assert_eq!(problem["status"], status, "{problem}");
        for field in ["type", "title", "detail"] {
            assert!(problem[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {problem}");
        }
        if matches!(status, 429 | 503) {
            let seconds: u64 = self.header("retry-after").parse().expect("whole seconds");
            assert!(seconds >= 1, "{seconds}");
        }
        problem
    }

    /// Checks that the response is a problem document with the fields of a rejected job, and returns the document.
    #[track_caller]
    pub fn rejected(&self, status: u16, reason: &str) -> Value {
        let problem = self.problem(status);
        let is_retryable = matches!(status, 429 | 503);
        let fields = [("outcome", "rejected"), ("reason", reason), ("executed", "no")];
        for (field, expected) in fields {
            assert_eq!(problem[field], expected, "{field}: {problem}");
            assert_eq!(self.header(&format!("bulkhead-{field}")), expected, "{field}: {problem}");
        }
        assert_eq!(problem["retryable"], is_retryable, "{problem}");
        assert_eq!(self.header("bulkhead-retryable"), is_retryable.to_string(), "{problem}");
        assert_eq!(problem["retry_after_ms"].is_number(), is_retryable, "{problem}");
        problem
    }
}

fn read_head(reader: &mut BufReader<Socket>) -> Option<(u16, BTreeMap<String, String>)> {
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).ok().map(|_| line.trim_end().to_owned())
    };
    let status = line()?.split(' ').nth(1)?.parse().ok()?;
    let mut headers = BTreeMap::new();
    while let Some((name, value)) = line()?.split_once(':') {
        let all: &mut String = headers.entry(name.to_ascii_lowercase()).or_default();
        *all += if all.is_empty() { "" } else { ", " };
        *all += value.trim();
    }
    Some((status, headers))
}
