//! A scripted HTTP server on the loopback interface.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request as it came; header names in lower case.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) line: String,
    pub(crate) headers: BTreeMap<String, String>,
}

/// An answer: head, the bytes that follow, and whether the connection then goes silent instead of being closed.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    head: String,
    body: Vec<u8>,
    stalls: bool,
    pause: Duration,
}

pub(crate) struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
}

type Script = dyn Fn(usize, &Request) -> Reply + Send + Sync;

impl Server {
    /// Answers request number `n` (from 0) with `script(n, request)`.
    pub(crate) fn start(script: impl Fn(usize, &Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (requests, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (script, seen, stopped): (Arc<Script>, _, _) = (Arc::new(script), Arc::clone(&requests), Arc::clone(&stop));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (script, seen, stopped) = (Arc::clone(&script), Arc::clone(&seen), Arc::clone(&stopped));
                thread::spawn(move || {
                    let _ = stream.and_then(|stream| serve(stream, &*script, &seen, &stopped));
                });
            }
        });
        Self { address, requests, stop }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The `Range` header of each request; empty where there was none.
    pub(crate) fn ranges(&self) -> Vec<String> {
        self.requests().iter().map(|request| request.header("range")).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(&self.address);
    }
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> String {
        self.headers.get(name).cloned().unwrap_or_default()
    }

    /// First byte of the requested range.
    pub(crate) fn start(&self) -> Option<usize> {
        self.header("range").strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }

    fn read(reader: &mut impl BufRead) -> std::io::Result<Self> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let mut lines = lines.into_iter();
        let line = lines.next().ok_or(std::io::ErrorKind::UnexpectedEof)?;
        let headers = lines.filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        });
        Ok(Self { line, headers: headers.collect() })
    }
}

impl Reply {
    pub(crate) fn new(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        let mut head = format!("HTTP/1.1 {status} Scripted\r\nConnection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        Self { head, body: body.to_vec(), stalls: false, pause: Duration::ZERO }
    }

    /// The whole content, whatever was asked for.
    pub(crate) fn whole(content: &[u8]) -> Self {
        Self::new(200, &[("Content-Length", &content.len().to_string())], content)
    }

    /// What was asked for, as a correct server sends it.
    pub(crate) fn correct(content: &[u8], request: &Request) -> Self {
        let Some(start) = request.start() else { return Self::whole(content) };
        if start >= content.len() {
            return Self::new(416, &[("Content-Range", &format!("bytes */{}", content.len()))], b"");
        }
        let range = format!("bytes {start}-{}/{}", content.len() - 1, content.len());
        let rest = &content[start..];
        Self::new(206, &[("Content-Range", &range), ("Content-Length", &rest.len().to_string())], rest)
    }

    /// The connection is cut after `len` bytes of the body.
    pub(crate) fn cut_after(mut self, len: usize) -> Self {
        self.body.truncate(len);
        self
    }

    /// The connection goes silent after `len` bytes of the body.
    pub(crate) fn stall_after(mut self, len: usize) -> Self {
        self.stalls = true;
        self.cut_after(len)
    }

    /// The body comes after a pause.
    pub(crate) fn after(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }
}

fn serve(stream: TcpStream, script: &Script, seen: &Mutex<Vec<Request>>, stop: &AtomicBool) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    loop {
        let request = Request::read(&mut reader)?;
        let is_tunnel = request.line.starts_with("CONNECT");
        let number = {
            let mut seen = seen.lock().unwrap();
            seen.push(request.clone());
            seen.len() - 1
        };
        if is_tunnel {
            // A proxy that is at once the host behind it.
            stream.write_all(b"HTTP/1.1 200 Connected\r\n\r\n")?;
            continue;
        }
        let reply = script(number, &request);
        stream.write_all(format!("{}\r\n", reply.head).as_bytes())?;
        thread::sleep(reply.pause);
        stream.write_all(&reply.body)?;
        while reply.stalls && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
        return Ok(());
    }
}
