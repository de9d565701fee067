/* Runs a program with an empty environment, as `env -i` or a login shell would. */
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char *nothing[] = {NULL};
    if (argc < 2)
        return 2;
    execve(argv[1], argv + 1, nothing);
    perror(argv[1]);
    return 1;
}
