//! Downloads against a loopback server and a script in the place of pip: nothing here leaves the machine.

mod fixture;
mod hub;
mod packages;
mod server;
mod store;
