//! HTTP: every way in which a server can be right or wrong.

use crate::fixture::{Fixture, PIECE, SIZE, Watcher};
use crate::server::{Reply, Request, Server};
use npuhal_models::pull::{Phase, Proxies, PullError, SourceError, Token};
use proptest::prelude::*;
use std::fs;
use std::time::{Duration, Instant};

/// A server that answers request `n` with `script(content, n, request)`, and a fixture that pulls from it.
fn setup(script: impl Fn(&[u8], usize, &Request) -> Reply + Send + Sync + 'static) -> (Fixture, Server) {
    let content = crate::fixture::content();
    let server = Server::start(move |n, request| script(&content, n, request));
    (Fixture::hub(&server.url()), server)
}

fn only<T: std::fmt::Debug>(mut values: Vec<T>) -> T {
    assert_eq!(values.len(), 1, "{values:?}");
    values.remove(0)
}

#[test]
fn a_file_is_fetched_once_and_needs_no_network_afterwards() {
    let (fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    assert_eq!(fixture.pull().unwrap(), fixture.store.path_of(&fixture.entry));
    fixture.assert_finished();
    let request = only(server.requests());
    let path = "/owner/name/resolve/0123456789012345678901234567890123456789/m.gguf";
    assert_eq!(request.line, format!("GET {path} HTTP/1.1"));
    assert_eq!(request.header("accept-encoding"), "identity");
    assert_eq!(request.header("authorization"), "");
    let mut watcher = Watcher::default();
    fixture.pull_with(&mut watcher).unwrap();
    assert_eq!(watcher.phases, [], "neither asked nor read again");
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_cut_connection_is_continued_where_it_was_cut() {
    let (fixture, server) = setup(|content, n, request| {
        let reply = Reply::correct(content, request);
        if n < 2 { reply.cut_after(100_000) } else { reply }
    });
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["", "bytes=100000-", "bytes=200000-"]);
}

#[test]
fn a_connection_that_is_always_cut_is_given_up() {
    let (fixture, server) = setup(|content, n, request| {
        let reply = Reply::correct(content, request);
        reply.cut_after(if n == 0 { 100_000 } else { 10 })
    });
    let failure = only(fixture.pull_fails());
    assert!(matches!(failure, SourceError::Interrupted { got_bytes: 100_030, attempts: 4, .. }), "{failure}");
    assert_eq!(server.requests().len(), 4);
    assert_eq!(fixture.part_len(), Some(100_030));
}

#[test]
fn cancelling_keeps_the_beginning_and_the_next_pull_asks_for_the_rest_only() {
    let (fixture, server) = setup(|content, n, request| match n {
        0 => Reply::whole(content).stall_after(150_000),
        _ => Reply::correct(content, request),
    });
    let mut watcher = Watcher { cancel_in: Some((Phase::Downloading, 150_000)), ..Watcher::default() };
    let start = Instant::now();
    let stopped = fixture.pull_with(&mut watcher).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(2), "stopped at once");
    assert!(matches!(stopped, PullError::Cancelled { done_bytes: 150_000, .. }), "{stopped}");
    assert_eq!(fixture.part_len(), Some(150_000));
    assert_eq!(fixture.leftovers().len(), 0);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["", "bytes=150000-"]);
}

#[test]
fn a_server_that_ignores_the_range_is_survived() {
    let (fixture, server) = setup(|content, _, _| Reply::whole(content));
    fixture.write_part(&fixture.content[..123_456]);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["bytes=123456-"]);
}

#[test]
fn a_range_that_cannot_be_satisfied_starts_over() {
    let (fixture, server) = setup(|content, _, request| match request.start() {
        Some(_) => Reply::new(416, &[], b""),
        None => Reply::whole(content),
    });
    fixture.write_part(&fixture.content[..1000]);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["bytes=1000-", ""]);
}

#[test]
fn a_range_refused_because_the_file_is_another_is_a_failure() {
    let (fixture, server) = setup(|_, _, _| Reply::new(416, &[("Content-Range", "bytes */500")], b""));
    fixture.write_part(&fixture.content[..1000]);
    let failure = only(fixture.pull_fails());
    assert!(matches!(failure, SourceError::NotTheFile { .. }), "{failure}");
    assert_eq!(server.requests().len(), 1);
    assert_eq!(fixture.part_len(), Some(1000), "what was there may still be right");
}

#[test]
fn wrong_ranges_are_refused() {
    let lengths = |first: usize| (SIZE - first).to_string();
    let cases: Vec<Vec<(&str, String)>> = vec![
        vec![],
        vec![("Content-Range", format!("bytes 999-{}/{SIZE}", SIZE - 1)), ("Content-Length", lengths(999))],
        vec![("Content-Range", format!("bytes 1000-{}/{SIZE}", SIZE))],
        vec![("Content-Range", "bytes 1000-900/*".to_owned())],
        vec![("Content-Range", format!("bytes 1000-{}/{SIZE}", SIZE - 1)), ("Content-Length", lengths(999))],
        vec![("Content-Range", format!("bytes 1000-{}/{}", SIZE - 1, SIZE + 1))],
        vec![("Content-Range", "apples".to_owned())],
    ];
    for headers in cases {
        let sent = headers.clone();
        let (fixture, server) = setup(move |content, _, _| {
            let headers: Vec<(&str, &str)> = sent.iter().map(|(name, value)| (*name, value.as_str())).collect();
            Reply::new(206, &headers, &content[1000..])
        });
        fixture.write_part(&fixture.content[..1000]);
        let failure = only(fixture.pull_fails());
        let refused = matches!(failure, SourceError::Protocol { .. } | SourceError::NotTheFile { .. });
        assert!(refused, "{headers:?}: {failure}");
        assert_eq!((server.requests().len(), fixture.part_len()), (1, Some(1000)), "{headers:?}");
    }
}

#[test]
fn pages_and_other_files_are_refused_before_they_are_kept() {
    type Case = (&'static str, fn(&[u8]) -> Reply);
    let cases: [Case; 8] = [
        ("web page", |_| Reply::new(200, &[("Content-Type", "text/html; charset=utf-8")], b"<html>Log in</html>")),
        ("`<html>", |_| Reply::new(200, &[], b"<html>Log in</html>")),
        ("`<a", |_| Reply::new(200, &[], b"<a")),
        ("version https", |_| Reply::new(200, &[], b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")),
        ("a file of 299999 bytes", |content| Reply::whole(&content[..SIZE - 1])),
        ("a file of 7 bytes", |content| Reply::new(200, &[("X-Linked-Size", "7")], content)),
        ("SHA-256 0000", |content| Reply::new(200, &[("X-Linked-ETag", &format!("\"{}\"", "0".repeat(64)))], content)),
        ("Content-Encoding: gzip", |content| Reply::new(200, &[("Content-Encoding", "gzip")], content)),
    ];
    for (expected, reply) in cases {
        let (fixture, server) = setup(move |content, _, _| reply(content));
        let failure = only(fixture.pull_fails()).to_string();
        assert!(failure.contains(expected), "{expected}: {failure}");
        assert_eq!((server.requests().len(), fixture.part_len()), (1, None), "{expected}");
        assert!(!fixture.store.path_of(&fixture.entry).exists());
    }
}

#[test]
fn statuses_are_final_or_tried_again() {
    for (status, requests) in [(404, 1), (403, 1), (401, 1), (204, 1), (500, 4), (503, 4), (429, 4)] {
        let (fixture, server) = setup(move |_, _, _| Reply::new(status, &[("Retry-After", "0")], b""));
        let failure = only(fixture.pull_fails());
        assert!(matches!(failure, SourceError::Status { status: found, .. } if found == status), "{failure}");
        assert_eq!(server.requests().len(), requests, "{status}");
    }
    let (fixture, server) = setup(|content, n, request| match n {
        0 => Reply::new(500, &[], b"<html>trouble</html>"),
        1 => Reply::correct(content, request).cut_after(0),
        _ => Reply::correct(content, request),
    });
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn the_token_stays_with_the_endpoint() {
    let content = crate::fixture::content();
    let elsewhere = Server::start(move |n, request| {
        let reply = Reply::correct(&content, request);
        if n == 0 { reply.cut_after(70_000) } else { reply }
    });
    let target = format!("{}/signed?key=1", elsewhere.url());
    let (mut fixture, server) = setup(move |_, _, request| {
        if request.line.contains("/moved") {
            Reply::new(302, &[("Location", &target)], b"")
        } else {
            Reply::new(307, &[("Location", "/moved")], b"")
        }
    });
    fixture.options.token = Some(Token::new("secret"));
    fixture.pull().unwrap();
    fixture.assert_finished();
    let tokens = |server: &Server| server.requests().iter().map(|r| r.header("authorization")).collect::<Vec<_>>();
    assert_eq!(tokens(&server), ["Bearer secret"; 4]);
    assert_eq!(tokens(&elsewhere), ["", ""]);
    assert_eq!(elsewhere.ranges(), ["", "bytes=70000-"]);
    assert!(!format!("{:?}", fixture.options).contains("secret"));
}

#[test]
fn endless_and_odd_redirects_are_refused() {
    for (location, requests) in [("/again", 11), ("ftp://127.0.0.1/x", 1), ("", 1)] {
        let (fixture, server) = setup(move |_, _, _| Reply::new(302, &[("Location", location)], b""));
        let failure = only(fixture.pull_fails());
        assert!(matches!(failure, SourceError::Redirect { .. }), "{failure}");
        assert_eq!(server.requests().len(), requests);
    }
}

#[test]
fn a_silent_server_is_left_and_asked_again() {
    let (mut fixture, server) = setup(|content, n, request| {
        let reply = Reply::correct(content, request);
        if n == 0 { reply.stall_after(80_000) } else { reply }
    });
    fixture.options.stall_timeout = Duration::from_millis(200);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["", "bytes=80000-"]);
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let (mut fixture, server) = setup(|content, _, _| Reply::whole(content).stall_after(0));
    fixture.options.stall_timeout = Duration::from_millis(100);
    let failure = only(fixture.pull_fails());
    assert!(matches!(failure, SourceError::Interrupted { got_bytes: 0, attempts: 4, .. }), "{failure}");
    assert_eq!(server.requests().len(), 4);
}

#[test]
fn wrong_content_of_the_right_size_is_thrown_away() {
    let (fixture, server) = setup(|content, _, _| {
        let mut content = content.to_vec();
        content[SIZE / 2] ^= 1;
        Reply::whole(&content)
    });
    let failure = only(fixture.pull_fails());
    assert!(matches!(failure, SourceError::WrongChecksum { .. }), "{failure}");
    assert_eq!((server.requests().len(), fixture.part_len()), (1, None));
}

#[test]
fn no_more_is_written_than_the_file_has() {
    let (fixture, _server) = setup(|content, _, _| {
        let mut content = content.to_vec();
        content[1000] ^= 1;
        content.resize(3 * SIZE, 0);
        Reply::new(200, &[], &content)
    });
    let failure = only(fixture.pull_fails());
    assert!(matches!(failure, SourceError::WrongChecksum { end: 300_000, .. }), "{failure}");
    // The right bytes, followed by more.
    let (fixture, _server) = setup(|content, _, _| Reply::new(200, &[], &[content, &[0; 1000]].concat()));
    fixture.pull().unwrap();
    fixture.assert_finished();
}

#[test]
fn a_body_without_a_length_that_ends_early_is_continued() {
    let (fixture, server) = setup(|content, n, request| match n {
        0 => Reply::new(200, &[], &content[..90_000]),
        _ => Reply::correct(content, request),
    });
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["", "bytes=90000-"]);
}

#[test]
fn damaged_beginnings_are_replaced() {
    let (fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    let mut damaged = fixture.content[..200_000].to_vec();
    damaged[5] ^= 1;
    fixture.write_part(&damaged);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), ["bytes=200000-", ""]);
    // Where pieces have checksums of their own, the right ones are kept.
    let content = fixture.content.clone();
    let server = Server::start(move |_, request| Reply::correct(&content, request));
    let fixture = Fixture::both(&server.url());
    let mut damaged = fixture.content[..PIECE + PIECE + 10].to_vec();
    damaged[PIECE + 5] ^= 1;
    fixture.write_part(&damaged);
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.ranges(), [format!("bytes={PIECE}-")]);
}

#[test]
fn a_complete_unfinished_file_is_finished_without_asking() {
    let (fixture, server) = setup(|_, _, _| Reply::new(500, &[], b""));
    fixture.write_part(&[fixture.content.as_slice(), b"surplus"].concat());
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn an_unreachable_source_fails_fast_and_packages_continue_what_a_source_began() {
    let fixture = Fixture::both("http://127.0.0.1:9");
    let start = Instant::now();
    let mut watcher = Watcher::default();
    fixture.pull_with(&mut watcher).unwrap();
    assert!(start.elapsed() < Duration::from_secs(3));
    assert!(only(watcher.failures).contains("no connection"));
    fixture.assert_finished();

    let content = fixture.content.clone();
    let server = Server::start(move |n, request| {
        Reply::correct(&content, request).cut_after(if n == 0 { PIECE + 10 } else { 0 })
    });
    let fixture = Fixture::both(&server.url());
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(fixture.asked(), ["piece-1==1.0", "piece-2==1.0"], "the first piece had come from the hub");
}

#[test]
fn the_last_error_lists_every_source_with_its_reason() {
    let (fixture, _server) = setup(|_, _, _| Reply::new(404, &[], b""));
    let mut both = Fixture::both(&fixture.options.endpoint);
    both.set_pip("echo 'No matching distribution found' >&2; exit 1");
    let error = both.pull().unwrap_err().to_string();
    for expected in ["m.gguf", "hub repository owner/name at 01234567", "404", "piece-0 to piece-2", "No matching"] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn proxies_are_used_and_only_where_they_should_be() {
    let (mut fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    let proxy = Some(server.url());
    fixture.options.endpoint = "http://hub.test".to_owned();
    fixture.options.proxies = Proxies { http: proxy.clone(), ..Proxies::default() };
    fixture.pull().unwrap();
    fixture.assert_finished();
    assert_eq!(server.requests()[0].line, "CONNECT hub.test:80 HTTP/1.1");

    let (mut fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    let direct = "127.0.0.1".to_owned();
    fixture.options.proxies = Proxies { http: Some("http://127.0.0.1:9".to_owned()), direct, ..Proxies::default() };
    fixture.pull().unwrap();
    assert!(only(server.requests()).line.starts_with("GET"));

    let (mut fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    for proxy in ["socks5://user:hidden@127.0.0.1:9", "http://", "http://user:hidden@127.0.0.1:9"] {
        fixture.options.proxies = Proxies { all: Some(proxy.to_owned()), ..Proxies::default() };
        let failure = only(fixture.pull_fails());
        assert!(matches!(failure, SourceError::Unreachable { .. }), "{failure}");
        assert!(!failure.to_string().contains("hidden"), "{failure}");
    }
    assert_eq!(server.requests().len(), 0, "a proxy that cannot be used is not passed by");
}

#[test]
fn an_endpoint_that_is_no_address_is_named() {
    let (mut fixture, _server) = setup(|content, _, request| Reply::correct(content, request));
    for endpoint in ["hub.test", "ftp://hub.test", "http://", "http://a b"] {
        fixture.options.endpoint = endpoint.to_owned();
        let failure = only(fixture.pull_fails());
        assert!(matches!(failure, SourceError::Unreachable { .. }), "{failure}");
        assert!(failure.to_string().contains(endpoint), "{failure}");
    }
}

#[test]
fn two_pulls_of_one_file_do_not_meet() {
    let (fixture, server) =
        setup(|content, _, request| Reply::correct(content, request).after(Duration::from_millis(400)));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| fixture.pull());
        while server.requests().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut watcher = Watcher::default();
        fixture.pull_with(&mut watcher).unwrap();
        assert_eq!(watcher.phases, [Phase::Waiting]);
        first.join().unwrap().unwrap();
    });
    fixture.assert_finished();
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_full_disk_is_noticed_before_the_start() {
    let (mut fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    fixture.entry.size_bytes = 1 << 62;
    let error = fixture.pull().unwrap_err();
    match &error {
        PullError::NoSpace { wanted_bytes, free_bytes, .. } => assert!(free_bytes < wanted_bytes && *free_bytes > 0),
        other => panic!("{other}"),
    }
    assert!(error.to_string().contains("4611686018427387904 bytes"), "{error}");
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn offline_runs_ask_nobody() {
    let (mut fixture, server) = setup(|content, _, request| Reply::correct(content, request));
    fixture.options.offline = true;
    let error = fixture.pull().unwrap_err();
    assert!(matches!(error, PullError::Offline { .. }));
    assert!(error.to_string().contains("m.gguf") && error.to_string().contains("npuhal pull m"), "{error}");
    assert!(!fixture.store.folder().exists());

    fs::create_dir_all(fixture.store.folder()).unwrap();
    fs::write(fixture.store.path_of(&fixture.entry), &fixture.content).unwrap();
    fixture.pull().unwrap();
    let mut wrong = fixture.content.clone();
    wrong[7] ^= 1;
    fs::write(fixture.store.path_of(&fixture.entry), &wrong).unwrap();
    assert!(fixture.pull().unwrap_err().to_string().contains("SHA-256"));
    assert_eq!(server.requests().len(), 0);

    fixture.options.offline = false;
    fixture.pull().unwrap();
    fixture.assert_finished();
}

/// What a server does with one request.
#[derive(Debug, Clone)]
struct Whim {
    ignores_range: bool,
    refuses_range: bool,
    sends_length: bool,
    fails: bool,
    cut: usize,
}

fn whims() -> impl Strategy<Value = Vec<Whim>> {
    let whim = (any::<bool>(), prop::bool::weighted(0.1), any::<bool>(), prop::bool::weighted(0.1), 0..SIZE);
    let whim = whim.prop_map(|(ignores_range, refuses_range, sends_length, fails, cut)| Whim {
        ignores_range,
        refuses_range,
        sends_length,
        fails,
        cut,
    });
    prop::collection::vec(whim, 0..6)
}

fn whimsical(content: &[u8], request: &Request, whim: &Whim) -> Reply {
    let start = request.start().filter(|_| !whim.ignores_range);
    if whim.fails {
        return Reply::new(502, &[], b"<html>bad gateway</html>");
    }
    if whim.refuses_range && request.start().is_some() {
        return Reply::new(416, &[], b"");
    }
    match start {
        Some(_) => Reply::correct(content, request).cut_after(whim.cut),
        None if whim.sends_length => Reply::whole(content).cut_after(whim.cut),
        None => Reply::new(200, &[], &content[..whim.cut]),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_server_does_the_file_is_right_in_the_end(whims in whims(), present in 0..SIZE, flip in any::<bool>()) {
        let (mut fixture, _server) = setup(move |content, n, request| match whims.get(n) {
            Some(whim) => whimsical(content, request, whim),
            None => Reply::correct(content, request),
        });
        fixture.options.attempts = 10;
        let mut beginning = fixture.content[..present].to_vec();
        if let Some(byte) = beginning.last_mut().filter(|_| flip) {
            *byte ^= 0x80;
        }
        fixture.write_part(&beginning);
        fixture.pull().unwrap();
        fixture.assert_finished();
    }
}
