//! Who may run: a bounded queue in order of arrival, a rate limit for each client, and the end of the service.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// A request that was admitted: it counts as active until this is dropped.
pub(crate) struct Ticket {
    admission: Arc<Admission>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.admission.active.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.admission.idle.notify_waiters();
        }
    }
}

/// The places of a request that runs; given back when this is dropped.
pub(crate) struct Place {
    admission: Arc<Admission>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.admission.running.fetch_sub(1, Ordering::SeqCst);
    }
}

pub(crate) struct Admission {
    places: Arc<Semaphore>,
    limit: usize,
    running: AtomicUsize,
    active: AtomicUsize,
    draining: AtomicBool,
    idle: Notify,
}

impl Admission {
    /// `running` answers are made side by side, `queued` requests more may wait.
    pub(crate) fn new(running: usize, queued: usize) -> Arc<Self> {
        Arc::new(Self {
            places: Arc::new(Semaphore::new(running)),
            limit: running + queued,
            running: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            idle: Notify::new(),
        })
    }

    /// A ticket, unless the queue is full.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Ticket> {
        let entered = self
            .active
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |active| (active < self.limit).then_some(active + 1));
        entered.is_ok().then(|| Ticket { admission: Arc::clone(self) })
    }

    /// Waits for as many places as a request makes answers side by side; they are given in order of arrival.
    pub(crate) async fn place(self: &Arc<Self>, answers: u32) -> Option<Place> {
        let permit = Arc::clone(&self.places).acquire_many_owned(answers).await.ok()?;
        self.running.fetch_add(1, Ordering::SeqCst);
        Some(Place { admission: Arc::clone(self), _permit: permit })
    }

    /// Requests that run or wait.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.active().saturating_sub(self.running.load(Ordering::SeqCst))
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Waits until no request is active.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.active() == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// A sliding window of one minute for each client address.
pub(crate) struct RateLimit {
    per_minute: u32,
    counts_local: bool,
    clients: Mutex<Clients>,
}

#[derive(Default)]
struct Clients {
    requests: HashMap<IpAddr, VecDeque<Instant>>,
    pruned: Option<Instant>,
}

const WINDOW: Duration = Duration::from_secs(60);

impl RateLimit {
    /// `per_minute` requests a client; 0 for any number. Clients on this machine are free unless `counts_local`.
    pub(crate) fn new(per_minute: u32, counts_local: bool) -> Self {
        Self { per_minute, counts_local, clients: Mutex::default() }
    }

    /// Counts a request of `client` at `now`; otherwise says after which time it may come back.
    pub(crate) fn admit(&self, client: IpAddr, now: Instant) -> Result<(), Duration> {
        let client = client.to_canonical();
        if self.per_minute == 0 || client.is_loopback() && !self.counts_local {
            return Ok(());
        }
        let client = network_of(client);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |time: &Instant| now.saturating_duration_since(*time) < WINDOW;
        if !clients.pruned.as_ref().is_some_and(is_recent) {
            clients.requests.retain(|_, times| times.back().is_some_and(is_recent));
            clients.pruned = Some(now);
        }
        let times = clients.requests.entry(client).or_default();
        while times.front().is_some_and(|time| !is_recent(time)) {
            times.pop_front();
        }
        if times.len() >= self.per_minute as usize {
            let oldest = times.front().map_or(Duration::ZERO, |time| now.saturating_duration_since(*time));
            return Err(WINDOW.saturating_sub(oldest));
        }
        times.push_back(now);
        Ok(())
    }
}

/// What one client can have: an IPv4 address, or a network of IPv6 with any number of addresses.
fn network_of(client: IpAddr) -> IpAddr {
    const HOST_BITS: u32 = 64;
    match client {
        IpAddr::V4(_) => client,
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> HOST_BITS << HOST_BITS)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_bounded_and_tickets_come_back() {
        let admission = Admission::new(1, 2);
        let tickets: Vec<_> = (0..3).map(|_| admission.enter().unwrap()).collect();
        assert!(admission.enter().is_none());
        drop(tickets);
        assert_eq!(admission.active(), 0);
        assert!(admission.enter().is_some());
    }

    #[tokio::test]
    async fn those_that_wait_are_counted() {
        let admission = Admission::new(2, 8);
        let tickets: Vec<_> = (0..5).map(|_| admission.enter().unwrap()).collect();
        let places = (admission.place(1).await.unwrap(), admission.place(1).await.unwrap());
        assert_eq!((admission.active(), admission.waiting()), (5, 3));
        drop(places);
        drop(tickets);
        assert_eq!((admission.active(), admission.waiting()), (0, 0));
    }

    /// One request with several answers took one place, and others were handed to a worker that had no room for them.
    #[tokio::test]
    async fn a_request_takes_a_place_for_each_answer_and_keeps_its_turn() {
        let admission = Admission::new(4, 8);
        let _tickets: Vec<_> = (0..3).map(|_| admission.enter().unwrap()).collect();
        let all = admission.place(4).await.unwrap();
        assert_eq!(admission.waiting(), 2);
        let order = Mutex::new(Vec::new());
        let wait = async |answers| {
            let place = admission.place(answers).await;
            order.lock().unwrap().push(answers);
            drop(place);
        };
        let free = async {
            tokio::task::yield_now().await;
            assert!(order.lock().unwrap().is_empty());
            drop(all);
        };
        tokio::join!(wait(3), wait(1), free);
        assert_eq!(*order.lock().unwrap(), [3, 1]);
        assert_eq!(admission.waiting(), 3);
    }

    #[test]
    fn clients_are_told_apart_by_what_one_client_can_have() {
        let limit = RateLimit::new(1, false);
        let now = Instant::now();
        let admit = |client: &str| limit.admit(client.parse().unwrap(), now).is_ok();
        assert!(admit("2001:db8::1"));
        assert!(!admit("2001:db8::2"), "the same network");
        assert!(admit("2001:db8:0:1::1"));
        assert!(admit("::ffff:192.0.2.7"));
        assert!(!admit("192.0.2.7"), "the same address");
        assert!(admit("::ffff:127.0.0.1") && admit("::ffff:127.0.0.1"), "this machine");
        let strict = RateLimit::new(1, true);
        let here = IpAddr::from([127, 0, 0, 1]);
        assert!(strict.admit(here, now).is_ok() && strict.admit(here, now).is_err());
    }

    #[test]
    fn the_window_slides_and_loopback_is_free() {
        let limit = RateLimit::new(2, false);
        let client = IpAddr::from([192, 0, 2, 1]);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(limit.admit(client, at(0)), Ok(()));
        assert_eq!(limit.admit(client, at(30)), Ok(()));
        assert_eq!(limit.admit(client, at(40)), Err(Duration::from_secs(20)));
        assert_eq!(limit.admit(IpAddr::from([192, 0, 2, 2]), at(40)), Ok(()));
        assert_eq!(limit.admit(client, at(61)), Ok(()));
        assert_eq!(limit.admit(client, at(62)), Err(Duration::from_secs(28)));
        for _ in 0..9 {
            assert_eq!(limit.admit(IpAddr::from([127, 0, 0, 1]), at(62)), Ok(()));
        }
    }
}
